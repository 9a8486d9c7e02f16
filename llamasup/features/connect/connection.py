"""A llamasup as a client reaches it: its address, the model, the key, and one request to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from subprocess import DEVNULL
from tempfile import NamedTemporaryFile

from msgspec.structs import replace

from llamasup.core.auth.key_source import environment_keys
from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from llamasup.core.control.served_model import served_model
from llamasup.core.http.errors import error_from
from llamasup.core.system.process.run_folder import run_folders
from llamasup.core.system.process.sweep import recorded_children
from llamasup.core.system.storage.folders import atomic_write, read_bounded
from llamasup.errors import ConfigInvalid, NotRunning
from llamasup.features.connect.check import PATHS, Reply, request_body
from llamasup.features.connect.clients import Client, Connection, Settings

_MAX_KEY_BYTES = 4096
_CATALOG, _CATALOG_TIMEOUT_S = "llamasup-models.json", 20.0
_CODEX_MODEL = Path(__file__).with_name("codex_model.json")
_CHECK_TIMEOUT_S = 600.0  # a request may wait for a load and for other requests


def key_from(path: Path | None) -> str:
    """Return the key of a client: from its file, else from the environment, else an empty text."""
    if path is None:
        return next(iter(environment_keys(os.environ)), "")
    try:
        words = read_bounded(path, _MAX_KEY_BYTES)[0].decode("ascii").split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ConfigInvalid(
            f"The file of --api-key-file cannot be read: {reason}.",
            remedy="Give a file with only the key of the client.",
        ) from None
    if len(words) != 1:  # a key with attributes is in the key file of the server
        raise ConfigInvalid(
            f"The file of --api-key-file has {len(words)} words, not one key.",
            remedy="Write only the key of the client into a file. `llamasup key new NAME` makes one.",
        )
    return words[0]


def connection_to(url: str, model: str | None, key: str) -> Connection:
    """Read the models at ``url`` as the client. Raises NotRunning, NotAllowed and UsageInvalid."""
    served = served_model(url, model, key, option="--model")
    return Connection(served.url, served.name, key, served.context)


def with_catalog(client: Client, settings: Settings, to: Connection, folder: Path) -> Settings:
    """Write a catalog of models into ``folder``, if the client has one. Returns the settings with its path.

    The format is not documented, and a client does not start with a catalog that it cannot read. So the
    installed program tries it first.
    """
    program = shutil.which(client.program)
    if not client.catalog or program is None:
        return settings
    model = {"slug": to.model, "display_name": to.model, "context_window": to.context}
    catalog = json.dumps({"models": [{**json.loads(_CODEX_MODEL.read_text("utf-8")), **model}]}).encode()
    try:
        with NamedTemporaryFile(suffix=".json") as file:
            file.write(catalog)
            file.flush()
            words = (program, "debug", "models", "-c", f"{client.catalog}={json.dumps(file.name)}")
            subprocess.run(words, stdin=DEVNULL, capture_output=True, timeout=_CATALOG_TIMEOUT_S, check=True)
        path = folder.expanduser().resolve() / _CATALOG
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, catalog, mode=0o600)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return settings
    return replace(settings, values={**settings.values, client.catalog: str(path)})


def running_with(model: str | None) -> str | None:
    """The address of a llamasup that serves ``model``; None if one has to be started."""
    found = discover()
    # Those of other launches end with their clients.
    private = {pid for folder, _ in run_folders() for pid in recorded_children(folder)}
    running = [each for each in found.running if each.pid not in private]
    if model is None and not (found.running or found.unresponsive or found.closed):
        raise NotRunning(
            "No llamasup is running on this machine for this user, and no MODEL was given.",
            remedy="Give a model, such as a GGUF file or org/repo:Q4_K_M, and the command starts it.",
        )
    if model is None:
        return select_running(replace(found, running=tuple(running)), None).url
    for each in running:
        with ControlClient(ControlAddress(socket=each.socket)) as control:
            status = control.status()
        if any(model == entry["id"] or model in (entry.get("aliases") or ()) for entry in status["models"]):
            return each.url
    return None


def exchange(client: Client, to: Connection) -> tuple[Reply, float | None]:
    """Send the request. Returns the reply, and the seconds until its first token."""
    reply, first_s = Reply(), None
    began_s = time.monotonic()
    with ControlClient(ControlAddress(url=to.url, api_key=to.key or None)) as server:
        body = request_body(client.api, to.model)
        for line in server.answer_lines(PATHS[client.api], body, _CHECK_TIMEOUT_S):
            reply = reply.after(line)
            if first_s is None and reply.has_begun:
                first_s = round(time.monotonic() - began_s, 3)
    if reply.error is not None:
        raise error_from(502, {"error": reply.error})
    return reply, first_s
