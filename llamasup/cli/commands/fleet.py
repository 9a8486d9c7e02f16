"""Deploys the models of a config on a Ray cluster, shows them and ends them (``llamasup fleet …``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamasup.cli.command_group import argument, command_set, option
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_shown
from llamasup.cli.output.view import View, while_waiting
from llamasup.cli.stop_signals import Interrupted

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = command_set("fleet", "Deploy models on a Ray cluster.\n\nThe commands need the extra `fleet`.")

File = Annotated[Path | None, argument("[CONFIG]", "The config. Default: as for `llamasup serve`.")]
Timeout = Annotated[
    float, option("--timeout", "SECONDS", "How long to wait. Ray continues after this time.", min=0)
]
TimeoutOfEnd = Annotated[
    float | None,
    option(
        "--timeout",
        "SECONDS",
        "How long to wait. Ray continues after this time. "
        "Default: a little longer than `fleet.drain_timeout`.",
        min=0,
    ),
]


@commands.command()
@guarded
def deploy(view: View, config: File = None, timeout: Timeout = 600.0, json: o.Json = False) -> None:
    """Deploy the models of a config, or update them."""
    from llamasup.fleet import deploy as fleet

    with _waiting(view, "deploying the models") as pause:
        shown = fleet.deploy(_config(config), timeout_s=timeout, pause=pause)
    write_shown(shown, shown_text(shown), json=json)


@commands.command()
@guarded
def status(view: View, config: File = None, json: o.Json = False) -> None:
    """Show the models of the fleet and their nodes."""
    from llamasup.fleet import deploy as fleet

    with _waiting(view, "asking Ray"):
        shown = fleet.status(_config(config))
    write_shown(shown, shown_text(shown), json=json)


@commands.command()
@guarded
def down(view: View, config: File = None, timeout: TimeoutOfEnd = None, json: o.Json = False) -> None:
    """Stop all models of the fleet after their running requests."""
    from llamasup.fleet import deploy as fleet

    with _waiting(view, "ending the models") as pause:
        shown = fleet.down(_config(config), timeout_s=timeout, pause=pause)
    ended = f"The fleet {_place(shown)} has ended."
    write_shown(shown, ended if shown["ended"] else _nothing(shown), json=json)


@contextmanager
def _waiting(view: View, text: str) -> Iterator[Callable[[float], None]]:
    """Show ``text`` while the block runs, and yield a function that pauses.

    Ray (2.60) writes news of the cluster to standard output, where only the result belongs: the state of the
    fleet has what matters of it. A thread of Serve may outlive the connection. It would make a new one, to
    any cluster of this machine, and write the traceback of its failure.
    """
    from llamasup.cli.interruptible import interruptible_at_pauses

    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        with (
            while_waiting(view, text),
            Path(os.devnull).open("w") as nowhere,
            redirect_stdout(nowhere),
            interruptible_at_pauses() as pause,
        ):
            yield pause
    except Interrupted:
        view.say("info", "stop", "Interrupted. Ray continues: `llamasup fleet status` shows the state.")
        raise


def _config(given: Path | None) -> Path:
    from llamasup.core.config.reading import find_config

    return find_config(given, os.environ)


def shown_text(shown: Mapping[str, Any]) -> str:
    """Format the result of ``status`` for the terminal."""
    if shown["application"] is None:
        return _nothing(shown)
    models = [
        (
            model["id"],
            model["state"].replace("_", " "),
            ", ".join(f"{count} {state}" for state, count in model["replicas"].items()) or "no replica",
            model["message"] or "",
        )
        for model in shown["models"]
    ]
    nodes = [
        (node["name"], _state(node), node["url"], f"{node['slots_busy']} of {node['slots']} slots busy")
        for node in shown["nodes"] or ()
    ]
    message = f": {shown['message']}" if shown["message"] else ""
    parts = [f"Fleet {_place(shown)}: {shown['application']}{message}", table(models)]
    return "\n\n".join([*parts, "Nodes:\n" + table(nodes)] if nodes else parts)


def _state(node: Mapping[str, Any]) -> str:
    return "asleep" if node["asleep"] and node["state"] == "ready" else str(node["state"])


def _place(shown: Mapping[str, Any]) -> str:
    return f"{shown['fleet']} on the Ray cluster at {shown['cluster']}"


def _nothing(shown: Mapping[str, Any]) -> str:
    remedy = "`llamasup fleet deploy CONFIG` deploys the models of a config."
    return f"Nothing is deployed as {_place(shown)}.\n{remedy}"
