"""Finds the running llamasup that a command talks to, by the options of the command."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamasup.cli.command_group import parameters_of, with_parameters
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import Group, number, path, takes_groups, text
from llamasup.cli.output.error_report import guarded, show_error
from llamasup.cli.output.view import View
from llamasup.core.pool.shown_state import AWAY
from llamasup.errors import LlamasupError, UsageInvalid

if TYPE_CHECKING:
    from llamasup.core.control.client import ControlAddress, ControlClient

URL_VARIABLE = "LLAMASUP_URL"
MAX_PORT = 65_535
_URL = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.%]+\]|[^\s/?#@:\[\]]+)(?::([0-9]{1,5}))?(?:/[^\s?#]*)?"
).fullmatch

# The arguments of ``find_target``.
_TARGET = Group(
    (
        number("--pid", "PID", "Process ID of the llamasup to talk to, if several run."),
        text(
            "--url",
            "URL",
            "URL of a llamasup. On another machine it needs a key with the control right. "
            "Env: $LLAMASUP_URL.",
        ),
        path("--api-key-file", "File with the API key for --url. Env: $LLAMASUP_API_KEY."),
    )
)

TargetOptions = Annotated[o.OptionValues, _TARGET]

Target = Mapping[str, Any]
"""The arguments of ``find_target``."""


def find_target(*, pid: int | None, url: str | None, api_key_file: Path | None) -> ControlAddress:
    """Return the address of the llamasup that a command talks to.

    Raises NotRunning, ConfigInvalid, and UsageInvalid if several run or the options exclude each other.
    """
    from llamasup.core.auth.key_source import client_key
    from llamasup.core.control.client import ControlAddress
    from llamasup.core.control.discovery import discover, socket_at
    from llamasup.core.control.selection import select_running

    if pid is not None and url is not None:
        raise UsageInvalid("--pid and --url exclude each other.", remedy="Leave one of them out.")
    if pid is None and url is None:
        url = os.environ.get(URL_VARIABLE) or None
    if url is None:
        if api_key_file is not None:
            raise UsageInvalid(
                "--api-key-file needs --url: a llamasup on this machine requires no key.",
                remedy=f"Leave --api-key-file out, or give --url or ${URL_VARIABLE}.",
            )
        return ControlAddress(socket=select_running(discover(), pid).socket)
    url, api_key = full_url(url), client_key(api_key_file, os.environ)
    # Its private socket needs no key.
    return ControlAddress(url=url, socket=None if api_key else socket_at(url), api_key=api_key)


def client_address(*, pid: int | None, url: str | None) -> tuple[str, Sequence[str]]:
    """Return the URL at which clients reach a running llamasup, and its loaded models, if they are known.

    Raises what ``find_target`` and ``ControlClient`` raise.
    """
    from llamasup.core.control.client import ControlClient

    address = find_target(pid=pid, url=url, api_key_file=None)
    if address.socket is None:
        return address.url, ()
    with ControlClient(address) as client:
        status = client.status()
    return str(status["url"]), [str(model["id"]) for model in status["models"] if model["state"] == "ready"]


def full_url(url: str) -> str:
    """Return the URL of a llamasup with its scheme and without ``/v1``. Raises UsageInvalid."""
    full = url if "://" in url else f"http://{url}"
    if "@" in full.split("/")[2]:  # errors and the list of processes would show the password
        raise UsageInvalid(
            "The URL contains a user name or a password.",
            remedy="Leave them out, and pass a key with --api-key-file or $LLAMASUP_API_KEY.",
        )
    match = _URL(full)
    if match is None or int(match[1] or 0) > MAX_PORT:
        raise UsageInvalid(
            f"{full!r} is not a valid URL of a llamasup.", remedy="Write it like http://localhost:8080."
        )
    return re.sub(r"/v1/?$", "", full)  # as clients of the models write it


def with_client(command: Callable[..., int | None]) -> Callable[..., Any]:
    """Give ``command(view, client, …)`` a client of the llamasup that the ``TargetOptions`` choose.

    The options of ``command`` come after the target options. The returned function shows the errors of
    ``command``, and returns the exit code.
    """

    @functools.wraps(command)
    def talk(view: View, *, target: Target, **given: Any) -> int | None:
        from llamasup.core.control.client import ControlClient

        with ControlClient(find_target(**target)) as client:
            return command(view, client, **given)

    own = parameters_of(command, given=2)
    keyword = inspect.Parameter.KEYWORD_ONLY
    first = inspect.Parameter("view", inspect.Parameter.POSITIONAL_ONLY)
    target = inspect.Parameter("target", keyword, annotation=TargetOptions)
    arguments = [parameter for parameter in own if parameter.kind is not keyword]
    options = [parameter for parameter in own if parameter.kind is keyword]
    return takes_groups(guarded(with_parameters(talk, [first, *arguments, target, *options])))


def with_each_client(view: View, target: Target, act: Callable[[ControlClient, str], object]) -> int:
    """Call ``act`` with a client of the chosen llamasup, or of each one if several run and none is chosen.

    The last argument of ``act`` says which one of several; it is empty for the only one. Returns the exit
    code.
    """
    from llamasup.core.control.client import ControlAddress, ControlClient
    from llamasup.core.control.discovery import discover
    from llamasup.core.control.selection import select_running

    is_chosen = any(value is not None for value in target.values()) or os.environ.get(URL_VARIABLE)
    found = None if is_chosen else discover()
    if found is None or len(found.running) < 2:
        only = None if found is None else select_running(found, None).socket
        address = find_target(**target) if found is None else ControlAddress(socket=only)
        with ControlClient(address) as client:
            act(client, "")
        return 0
    code = 0
    for running in found.running:
        try:
            with ControlClient(ControlAddress(socket=running.socket)) as client:
                act(client, f"--pid {running.pid}  {running.url}")
        except LlamasupError as error:  # it may have just ended
            code = show_error(view, error)
    for process in found.unresponsive:
        view.say("warning", "unresponsive", f"The llamasup with PID {process.pid} does not answer.")
    return code


def models_to_show(status: Mapping[str, Any], *, all_: bool) -> tuple[Sequence[Mapping[str, Any]], int]:
    """Return the models that are loaded, loading or failed, and the number of the other models. A model of
    another node has the key ``node``.
    """
    elsewhere = [
        {**model, "node": node["name"]} for node in status.get("nodes") or () for model in node["models"]
    ]
    models = [*status["models"], *elsewhere]
    if all_ or len(models) == 1:
        return models, 0
    shown = [model for model in models if model["state"] not in AWAY]
    return shown, len(models) - len(shown)
