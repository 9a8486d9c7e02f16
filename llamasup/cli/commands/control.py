"""Talks to a running llamasup: ``status``, ``ps``, ``why``, ``load``, ``unload``, ``restart``, ``reload``,
``stop`` and ``logs``.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.options.parsers import whole_number
from llamasup.cli.output.error_report import guarded, show_error
from llamasup.cli.output.layout import stdout_columns
from llamasup.cli.output.results import write_bytes, write_json, write_result, write_shown
from llamasup.cli.output.status_table import models_table, summary
from llamasup.cli.output.view import View, plural, shortened, while_waiting
from llamasup.cli.target import TargetOptions, models_to_show, with_client, with_each_client
from llamasup.core.pool.shown_state import AWAY, ShownState
from llamasup.core.system.text import printable
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, UsageInvalid

if TYPE_CHECKING:
    from llamasup.core.control.client import ControlClient

commands = command_set()

_UNHEALTHY = frozenset({ShownState.FAILED, ShownState.BACKOFF})

_MAX_LINES = 10_000


Model = Annotated[str | None, argument("MODEL", "Name of the model. Default: the only model.")]
ModelToRestart = Annotated[str | None, argument("MODEL", "Name of the model. Default: all loaded models.")]
AllModels = Annotated[bool, flag("--all -a", "Also show models that are not loaded.")]
NoWait = Annotated[bool, flag("--no-wait", "Return immediately.")]
Now = Annotated[bool, flag("--now", "Abort the requests in flight.")]
WaitForExit = Annotated[bool, flag("--wait", "Wait until llamasup has exited.")]
Follow = Annotated[bool, flag("--follow -f", "Print new lines as they are written.")]
OwnLines = Annotated[bool, flag("--own", "Show llamasup's own messages, not those of a llama-server.")]
Lines = Annotated[
    int,
    option(
        "--lines -n",
        "N",
        f"Number of lines, at most {_MAX_LINES}.",
        read=partial(whole_number, minimum=0, maximum=_MAX_LINES),
    ),
]


@commands.command()
@takes_groups
@guarded
def ps(view: View, *, target: TargetOptions, all_: AllModels = False, json: o.Json = False) -> int:
    """List the models of each running llamasup.

    The table shows state, size, device, slots and restarts.
    """
    found = list[Mapping[str, Any]]()

    def act(client: ControlClient, which: str) -> None:
        status = client.status()
        found.append(status)
        if json:
            return
        if which:
            write_result(which)
        shown, left_out = models_to_show(status, all_=all_)
        if shown:
            write_result(models_table(shown, stdout_columns()))
        elif not left_out:
            _say(view, f"{which}: no models yet" if which else "There are no models yet")
        _say_left_out(view, left_out, any_shown=bool(shown), which=which)

    code = with_each_client(view, target, act)
    if json and found and not code:
        write_json(_together(found))
    return code


@commands.command()
@with_client
def status(view: View, client: ControlClient, *, all_: AllModels = False, json: o.Json = False) -> int:
    """Show the state of a running llamasup and its models.

    The exit code is 1 if a model has failed or waits for a restart.
    """
    status = client.status()
    shown, left_out = models_to_show(status, all_=all_)
    if json:
        write_json(status)
    else:
        write_result(summary(status, shown, stdout_columns()))
        _say_left_out(view, left_out, any_shown=bool(shown))
    return 1 if any(model["state"] in _UNHEALTHY for model in status["models"]) else 0


@commands.command()
@with_client
def why(view: View, client: ControlClient, model: Model = None, *, json: o.Json = False) -> None:
    """Explain why a model is in its state, and what would change it.

    Explains why a model is loaded, waiting, evicted, restarted, refused, or smaller than asked for.
    """
    answer = client.why(_named(client, model))
    write_shown(answer, _why_text(answer), json=json)


@commands.command()
@with_client
def load(
    view: View,
    client: ControlClient,
    model: Model = None,
    *,
    no_wait: NoWait = False,
    json: o.Json = False,
) -> None:
    """Load a model, and wait until it is ready."""
    name = _named(client, model)
    with while_waiting(view, f"loading {name}"):
        loaded = client.load(name, wait=not no_wait)
    _say(view, f"{name} {'is ready' if loaded.get('state') == 'ready' else 'is being loaded'}")
    if json:
        write_json(loaded)


@commands.command()
@with_client
def unload(
    view: View,
    client: ControlClient,
    model: Model = None,
    *,
    no_wait: NoWait = False,
    json: o.Json = False,
) -> None:
    """Unload a model, and wait until its memory is free.

    Requests in flight may finish.
    """
    name = _named(client, model)
    with while_waiting(view, f"unloading {name}"):
        unloaded = client.unload(name, wait=not no_wait)
    _say(view, f"{name} {'is being unloaded' if no_wait else 'is unloaded'}")
    if json:
        write_json(unloaded)


@commands.command()
@with_client
def restart(
    view: View,
    client: ControlClient,
    model: ModelToRestart = None,
    *,
    no_wait: NoWait = False,
    json: o.Json = False,
) -> int:
    """Restart one model, or all loaded models one by one.

    Requests wait until the model is ready again.
    """
    if model is not None:
        names = [model]
    else:
        names = [model["id"] for model in client.status()["models"] if model["state"] not in AWAY]
        if not names:
            raise UsageInvalid("No model is loaded.", remedy="Load one with `llamasup load MODEL`.")
    restarted, codes = [], []
    for name in names:
        try:
            with while_waiting(view, f"restarting {name}"):
                restarted.append(client.restart(name, wait=not no_wait))
        except LlamasupError as error:  # the other models are still restarted
            codes.append(show_error(view, error))
            continue
        _say(view, f"{name} {'is being restarted' if no_wait else 'is ready again'}")
    if json and (restarted or model is None):
        write_json(restarted[0] if model is not None else {"models": restarted})
    return codes[0] if codes else 0


@commands.command()
@with_client
def reload(view: View, client: ControlClient, *, no_wait: NoWait = False, json: o.Json = False) -> None:
    """Read the configuration again.

    Under run and wrap: restart the model.
    """
    with while_waiting(view, "reloading"):
        changes = client.reload(wait=not no_wait)
    if json:
        write_json(changes)
    text = _changes_text(changes) or "No changes"
    _say(view, "The configuration is being read again" if no_wait else text)
    if later := changes.get("next_start"):
        view.say("warning", "control", f"Restart llamasup to apply: {', '.join(later)}")


@commands.command()
@with_client
def stop(
    view: View,
    client: ControlClient,
    *,
    now: Now = False,
    wait: WaitForExit = False,
    json: o.Json = False,
) -> None:
    """Stop a running llamasup.

    Requests in flight may finish, unless --now is given.
    """
    wait_for_exit = _exit_waiter(client) if wait else None
    answer = client.shutdown(now=now)
    in_flight = answer.get("in_flight")
    waits = f": {plural(in_flight, 'request')} in flight may finish" if in_flight and not now else ""
    _say(view, f"llamasup (process {answer.get('pid')}) is stopping{waits}")
    if wait_for_exit is not None:
        with while_waiting(view, "stopping"):
            wait_for_exit()
        _say(view, "llamasup has exited")
    if json:
        write_json({**answer, "ended": wait_for_exit is not None})


@commands.command()
@with_client
def logs(
    view: View,
    client: ControlClient,
    model: Model = None,
    *,
    follow: Follow = False,
    lines: Lines = 200,
    own: OwnLines = False,
) -> None:
    """Show the log of a model's llama-server, or of llamasup."""
    if own and model is not None:
        raise UsageInvalid(
            f"--own shows the lines of llamasup itself, not those of {model!r}.",
            remedy="Leave one of them out.",
        )
    pieces = client.log(None if own else _named(client, model), lines=lines, follow=follow)
    for piece in _printable(pieces) if sys.stdout.isatty() else pieces:
        if not write_bytes(piece):
            return  # the reader has closed the pipe


def _together(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the status of the only llamasup, or the models of all, each with its llamasup's process ID."""
    if len(found) == 1:
        return found[0]
    return {
        "models": [{**model, "pid": status["pid"]} for status in found for model in status["models"]],
        "llamasups": [{name: status[name] for name in status if name != "models"} for status in found],
    }


def _changes_text(changes: Mapping[str, Any]) -> str:
    renamed = dict(changes.get("renamed", ()))
    parts = {
        "added": [id_ for id_ in changes.get("added", ()) if id_ not in renamed.values()],
        "changed": [*changes.get("changed", ()), *changes.get("retouched", ())],
        "removed": [id_ for id_ in changes.get("removed", ()) if id_ not in renamed],
        "renamed": [f"{old} to {new}" for old, new in renamed.items()],
        "config": changes.get("settings", ()),
    }
    return "; ".join(f"{change}: {shortened(names)}" for change, names in parts.items() if names)


def _why_text(answer: Mapping[str, Any]) -> str:
    lines = [printable(str(sentence)) for sentence in answer.get("sentences", ())]
    if change := answer.get("change"):
        lines += ["What would have to change:", *(f"  → {printable(str(sentence))}" for sentence in change)]
    return "\n".join(lines)


def _named(client: ControlClient, model: str | None) -> str:
    """Return ``model``, or the name of the only model."""
    if model is not None:
        return model
    names = [str(model["id"]) for model in client.status()["models"]]
    if len(names) == 1:
        return names[0]
    raise UsageInvalid(
        f"{len(names)} models are served; MODEL is required.", remedy="List them with `llamasup ps --all`."
    )


def _say_left_out(view: View, count: int, *, any_shown: bool, which: str = "") -> None:
    if count:
        models = plural(count, "model")
        text = f"{models} not loaded" if any_shown else f"None of {models} is loaded"
        of = f"{which}: " if which else ""
        _say(view, f"{of}{text}: --all lists {'them' if count > 1 else 'it'}")


def _exit_waiter(client: ControlClient) -> Callable[[], None]:
    """Make a function that waits for the exit. Call this before the stop: the ID may be reused later."""
    from llamasup.core.system.native import native

    if client.address.socket is not None:
        with suppress(ProcessLookupError):  # a llamasup in another container has other process IDs
            return native.wait_for_exit(client.status()["pid"])

    def until_silent() -> None:
        with suppress(NotRunning, ControlFailed):
            for _ in client.events():
                pass

    return until_silent


def _printable(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Escapes the control characters of a log, which could change the terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoding = sys.stdout.encoding or "utf-8"
    for piece in pieces:
        lines = decoder.decode(piece).split("\n")
        yield "\n".join(map(printable, lines)).encode(encoding, "backslashreplace")


def _say(view: View, text: str) -> None:
    view.say("info", "control", text)
