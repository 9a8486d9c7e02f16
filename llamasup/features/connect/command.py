"""Shows or writes the settings of a client for a running llamasup (``llamasup connect``)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.target import find_target
from llamasup.errors import ConfigInvalid, OutputFailed, UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.features.connect.clients import Client, Connection, Settings

commands = command_set()

_MAX_BYTES = 1 << 20  # of a settings file; an editor's has some kilobytes
_MAX_KEY_BYTES = 4096
_MAX_LISTED = 10
_BY_HAND = "Add the settings by hand; the command shows them without --write."

ClientName = Annotated[
    str | None, argument("CLIENT", "The client. Without it, the command lists the clients.")
]
Model = Annotated[str | None, option("--model", "NAME", "The model. Default: the only one.")]
Write = Annotated[bool, flag("--write", "Write the settings file, after showing the difference.")]
File = Annotated[Path | None, option("--file", "PATH", "The settings file. Default: that of the client.")]
Url = Annotated[
    str | None, option("--url", "URL", "The address for the client. Default: that of the running one.")
]
Pid = Annotated[
    int | None, option("--pid", "PID", "Process ID of the llamasup to connect to, if several run.")
]
ApiKeyFile = Annotated[
    Path | None,
    option("--api-key-file", "PATH", "File with only the key that the client sends. Env: $LLAMASUP_API_KEY."),
]


@commands.command()
@guarded
def connect(
    view: View,
    client: ClientName = None,
    *,
    model: Model = None,
    write: Write = False,
    file: File = None,
    url: Url = None,
    pid: Pid = None,
    api_key_file: ApiKeyFile = None,
    json: o.Json = False,
) -> None:
    """Show the settings of a client for a running llamasup.

    With --write, the command changes the settings file of the client, and keeps the file before.
    """
    from llamasup.features.connect.clients import CLIENTS

    if client is None:
        _list(CLIENTS, json=json)
        return
    chosen = _client(CLIENTS, client)
    if chosen.file is None and (write or file is not None):
        raise UsageInvalid(
            f"{chosen.title} has no settings file that other programs may write.",
            remedy=f"See what to enter: llamasup connect {client}",
        )
    connection = _connection(url, pid, model, _key(api_key_file))
    settings = chosen.settings(connection)
    path = None if chosen.file is None else file or _path_of(chosen)
    backup = None
    if write and path is not None:
        backup = _write(view, path, chosen, settings, connection.key, show=not json)
    if json:
        write_json(
            {
                "client": client,
                "file": None if path is None else str(path),
                "settings": settings.values,
                "environment": settings.environment,
                "steps": settings.steps,
                "backup": None if backup is None else str(backup),
            }
        )
    else:
        _show(chosen, settings, None if write else path)


def _list(clients: Mapping[str, Client], *, json: bool) -> None:
    if json:
        write_json({"clients": [{"name": name, "title": client.title} for name, client in clients.items()]})
    else:
        rows = [(name, client.title) for name, client in clients.items()]
        width = max(len(name) for name, _ in rows)
        write_result("\n".join(f"{name:{width}}  {title}" for name, title in rows))


def _client(clients: Mapping[str, Client], name: str) -> Client:
    from llamasup.core.system.text import did_you_mean

    if name not in clients:
        similar = did_you_mean(name, clients)
        raise UsageInvalid(
            f"There are no settings for the client {name!r}.",
            remedy=f"{similar[0].upper()}{similar[1:]}" if similar else f"Known: {', '.join(clients)}.",
        )
    return clients[name]


# --- the running llamasup ----------------------------------------------------------------------------


def _key(path: Path | None) -> str:
    from llamasup.core.auth.key_source import environment_keys
    from llamasup.core.system.storage.folders import read_bounded

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


def _connection(url: str | None, pid: int | None, model: str | None, key: str) -> Connection:
    from llamasup.core.control.client import ControlAddress, ControlClient
    from llamasup.features.connect.clients import Connection

    address = find_target(pid=pid, url=url, api_key_file=None)
    if address.socket is None:
        url = address.url
    else:
        with ControlClient(address) as control:
            url = str(control.status()["url"])
    url = url.rstrip("/").removesuffix("/v1")
    with ControlClient(ControlAddress(url=url, api_key=key or None)) as server:
        entries = {str(entry["id"]): entry for entry in server.models()}
        names = {str(name): id_ for id_, entry in entries.items() for name in entry.get("aliases") or ()}
    if model is None:
        if len(entries) != 1:
            raise UsageInvalid(
                f"{len(entries)} models are served at {url}.",
                remedy=f"Choose one with --model: {_listed(list(entries))}.",
            )
        (model,) = entries
    entry = entries.get(model) or entries.get(names.get(model, ""))
    if entry is None:
        raise UsageInvalid(
            f"The model {model!r} is not served at {url}.",
            remedy=f"Choose one of {_listed(list(entries))}.",
        )
    return Connection(url, model, key, _context(entry))


def _context(entry: Mapping[str, Any]) -> int | None:
    own, meta = entry.get("llamasup") or {}, entry.get("meta") or {}
    found = own.get("context") or meta.get("n_ctx") or meta.get("n_ctx_train")
    return found if isinstance(found, int) else None


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


# --- the settings file -------------------------------------------------------------------------------


def _path_of(client: Client) -> Path:
    folder = os.environ.get(client.folder_variable) if client.folder_variable else None
    return (Path(folder) if folder else Path.home() / client.folder) / (client.file or "")


def _write(
    view: View, path: Path, client: Client, settings: Settings, key: str, *, show: bool
) -> Path | None:
    """Change the file; returns its backup, if the file existed and changes."""
    from llamasup.core.system.native import native
    from llamasup.core.system.storage.folders import atomic_write, read_bounded
    from llamasup.features.connect.merge import CannotMerge, difference, has_key, merged

    path = path.expanduser()
    target = path.resolve()  # a link, such as one to a repository of settings, stays
    before, mode, is_open = b"", 0o600, False
    try:
        if target.exists():
            before, status = read_bounded(target, _MAX_BYTES + 1)
            mode, is_open = status.st_mode & 0o777, native.is_open_to_others(status)
    except OSError as error:
        raise _unwritable(path, error) from None
    if len(before) > _MAX_BYTES:
        raise _unchanged(path, f"it has more than {_MAX_BYTES >> 20} MiB")
    try:
        text = before.decode("utf-8-sig")
        after = merged(text, settings.values, client.format)
    except UnicodeDecodeError:
        raise _unchanged(path, "it is not UTF-8") from None
    except CannotMerge as error:
        raise _unchanged(path, str(error)) from None
    closed = mode & 0o700 if is_open and has_key(after, key) else mode
    backup = None
    if show and after != text:
        write_result(difference(text, after, str(path), key).rstrip("\n"))
    try:
        if after != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            backup = _backup(target, before, closed) if before else None  # it may have an earlier key
            atomic_write(target, after.encode(), mode=closed)
        elif closed != mode:
            target.chmod(closed)
    except OSError as error:
        raise _unwritable(path, error) from None
    view.say("info", "connect", f"{path} has these settings already." if after == text else f"Wrote {path}")
    if backup is not None:
        view.say("info", "connect", f"  → The file before is {backup}")
    if closed != mode:
        what = (
            f"  → Only you can access it now, because it has the key (mode {closed:04o}, before {mode:04o})"
        )
        view.say("info", "connect", what)
    return backup


def _backup(path: Path, content: bytes, mode: int) -> Path:
    """Write a copy under a new name."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            descriptor = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return backup


def _unchanged(path: Path, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"{str(path)!r} is not changed: {why}.", remedy=_BY_HAND)


def _unwritable(path: Path, error: OSError) -> OutputFailed:
    return OutputFailed(
        f"{str(path)!r} cannot be written: {error.strerror or error}.",
        remedy=_BY_HAND,
    )


def _show(client: Client, settings: Settings, path: Path | None) -> None:
    from llamasup.features.connect.merge import rendered

    parts = []
    if path is not None:
        parts.append(f"# {client.title}: add this to {path}\n{rendered(settings.values, client.format)}")
    if settings.environment:
        exports = "\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in settings.environment.items()
        )
        parts.append(f"# {client.title}: set these variables\n{exports}\n")
    if settings.steps:
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(settings.steps, 1))
        parts.append(f"# {client.title}\n{steps}\n")
    if parts:
        write_result("\n".join(parts).rstrip("\n"))
