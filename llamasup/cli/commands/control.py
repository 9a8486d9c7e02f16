"""The commands that talk to a running llamasup: ``ps``, ``status``, ``load`` … ``logs``."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from llamasup.cli.commands.target import reach
from llamasup.cli.errors import guarded, show_error
from llamasup.cli.output.layout import stdout_columns
from llamasup.cli.output.models_table import models_table, summary
from llamasup.cli.output.results import write_bytes, write_json, write_result
from llamasup.cli.output.view import View, plural, shortened, while_waiting
from llamasup.control.client import ControlClient
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, UsageInvalid
from llamasup.pool.state import AWAY
from llamasup.system.text import printable

__all__ = [
    "load_command",
    "logs_command",
    "ps_command",
    "reload_command",
    "restart_command",
    "status_command",
    "stop_command",
    "unload_command",
]

Where = Mapping[str, Any]
"""The arguments of ``reach``."""

_NOT_WELL = frozenset({"failed", "backoff"})


def ps_command(where: Where, *, all_: bool, json: bool) -> int:
    """List the models. Returns the exit code, as all of these do."""

    def act(view: View, client: ControlClient) -> None:
        status = client.status()
        if json:
            write_json(status)
            return
        shown, left_out = _shown(status, all_=all_)
        if shown:
            write_result(models_table(shown, stdout_columns()))
        elif not left_out:
            _say(view, "There is no model here yet")
        _tell_left_out(view, left_out, any_shown=bool(shown))

    return _talk(where, act)


def status_command(where: Where, *, all_: bool, json: bool) -> int:
    """Show what runs, and its models. 1 where one has failed, or waits to be started again."""

    def act(view: View, client: ControlClient) -> int:
        status = client.status()
        shown, left_out = _shown(status, all_=all_)
        if json:
            write_json(status)
        else:
            write_result(summary(status, shown, stdout_columns()))
            _tell_left_out(view, left_out, any_shown=bool(shown))
        return 1 if any(model["state"] in _NOT_WELL for model in status["models"]) else 0

    return _talk(where, act)


def load_command(where: Where, model: str | None, *, wait: bool, json: bool) -> int:
    """Have a model loaded, and wait until it serves."""

    def act(view: View, client: ControlClient) -> None:
        name = _named(client, model)
        with while_waiting(view, f"loading {name}"):
            loaded = client.load(name, wait=wait)
        _say(view, f"{name} {'serves' if loaded.get('state') == 'ready' else 'is being loaded'}")
        if json:
            write_json(loaded)

    return _talk(where, act)


def unload_command(where: Where, model: str | None, *, wait: bool, json: bool) -> int:
    """Have a model unloaded, and wait until its memory is free."""

    def act(view: View, client: ControlClient) -> None:
        name = _named(client, model)
        with while_waiting(view, f"unloading {name}"):
            unloaded = client.unload(name, wait=wait)
        _say(view, f"{name} {'is unloaded' if wait else 'is being unloaded'}")
        if json:
            write_json(unloaded)

    return _talk(where, act)


def restart_command(where: Where, model: str | None, *, wait: bool, json: bool) -> int:
    """Have a model started anew, or all that are loaded, one after the other."""

    def act(view: View, client: ControlClient) -> int:
        if model is not None:
            names = [model]
        else:
            names = [each["id"] for each in client.status()["models"] if each["state"] not in AWAY]
            if not names:
                raise UsageInvalid("No model is loaded.", remedy="Load one: llamasup load MODEL")
        restarted, codes = [], []
        for name in names:
            try:
                with while_waiting(view, f"restarting {name}"):
                    restarted.append(client.restart(name, wait=wait))
            except LlamasupError as error:  # of several the others begin anew all the same
                codes.append(show_error(view, error))
                continue
            _say(view, f"{name} {'serves again' if wait else 'is being restarted'}")
        if json and (restarted or model is None):
            write_json(restarted[0] if model is not None else {"models": restarted})
        return codes[0] if codes else 0

    return _talk(where, act)


def reload_command(where: Where, *, wait: bool, json: bool) -> int:
    """Have the configuration read again."""

    def act(view: View, client: ControlClient) -> None:
        with while_waiting(view, "reloading"):
            changes = client.reload(wait=wait)
        if json:
            write_json(changes)
        said = _changed(changes) or "Nothing has changed"
        _say(view, said if wait else "The configuration is being read again")
        if later := changes.get("next_start"):
            view.say("warning", "control", f"{', '.join(later)}: changed, and counts from the next start on")

    return _talk(where, act)


def _changed(changes: Mapping[str, Any]) -> str:
    renamed = dict(changes.get("renamed", ()))
    found = {
        "added": [id_ for id_ in changes.get("added", ()) if id_ not in renamed.values()],
        "changed": [*changes.get("changed", ()), *changes.get("retouched", ())],
        "removed": [id_ for id_ in changes.get("removed", ()) if id_ not in renamed],
        "under another name": [f"{old} as {new}" for old, new in renamed.items()],
        "config": changes.get("settings", ()),
    }
    return "; ".join(f"{what}: {shortened(each)}" for what, each in found.items() if each)


def stop_command(where: Where, *, now: bool, wait: bool, json: bool) -> int:
    """Stop llamasup; with ``wait`` return when it has ended."""

    def act(view: View, client: ControlClient) -> None:
        ended = _end(client) if wait else None
        answer = client.shutdown(now=now)
        in_flight = answer.get("in_flight")
        waits = f": {plural(in_flight, 'request')} in flight may finish" if in_flight and not now else ""
        _say(view, f"llamasup (process {answer.get('pid')}) is stopping{waits}")
        if ended is not None:
            with while_waiting(view, "stopping"):
                ended()
            _say(view, "It has ended")
        if json:
            write_json({**answer, "ended": ended is not None})

    return _talk(where, act)


def logs_command(where: Where, model: str | None, *, lines: int, follow: bool) -> int:
    """Print the end of llama-server's log; with ``follow`` go on until somebody stops it."""

    def act(view: View, client: ControlClient) -> None:
        shown = _for_terminal if sys.stdout.isatty() else _as_it_is
        for piece in map(shown(), client.log(_named(client, model), lines=lines, follow=follow)):
            if not write_bytes(piece):
                return  # nobody reads on

    return _talk(where, act)


# ---


def _talk(where: Where, act: Callable[[View, ControlClient], int | None]) -> int:
    def talk(view: View) -> int | None:
        with ControlClient(reach(**where)) as client:
            return act(view, client)

    return guarded(talk)


def _named(client: ControlClient, model: str | None) -> str:
    """The model that is meant where none is named: there is only one."""
    if model is not None:
        return model
    names = [str(each["id"]) for each in client.status()["models"]]
    if len(names) == 1:
        return names[0]
    raise UsageInvalid(
        f"{len(names)} models are served: say which one.", remedy="llamasup ps --all lists them."
    )


def _shown(status: Mapping[str, Any], *, all_: bool) -> tuple[Sequence[Mapping[str, Any]], int]:
    """The models that are loaded or about to be, or have failed; and how many others there are."""
    models = status["models"]
    if all_ or len(models) == 1:
        return models, 0
    shown = [model for model in models if model["state"] not in AWAY]
    return shown, len(models) - len(shown)


def _tell_left_out(view: View, count: int, *, any_shown: bool) -> None:
    if count:
        what = (
            f"{plural(count, 'model')} not loaded"
            if any_shown
            else f"None of {plural(count, 'model')} is loaded"
        )
        _say(view, f"{what}: --all lists {'them' if count > 1 else 'it'}")


def _end(client: ControlClient) -> Callable[[], None]:
    """What waits for the end. Begun before it is asked for, lest the process's number pass on."""
    from llamasup.system.process.exit_watch import end_of

    if client.place.socket is not None:
        with suppress(ProcessLookupError):  # of another container, where numbers are others
            return end_of(client.status()["pid"]).wait

    def until_silent() -> None:
        with suppress(NotRunning, ControlFailed):
            for _ in client.events():
                pass

    return until_silent


def _as_it_is() -> Callable[[bytes], bytes]:
    return lambda piece: piece


def _for_terminal() -> Callable[[bytes], bytes]:
    """What a log holds must not steer the terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoding = sys.stdout.encoding or "utf-8"

    def shown(piece: bytes) -> bytes:
        lines = decoder.decode(piece).split("\n")
        return "\n".join(map(printable, lines)).encode(encoding, "backslashreplace")

    return shown


def _say(view: View, text: str) -> None:
    view.say("info", "control", text)
