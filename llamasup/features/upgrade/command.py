"""Moves a running ``serve`` to another build of llama.cpp once it is proven (``llamasup upgrade``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamasup.cli.command_group import command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.output.results import write_json, write_shown
from llamasup.cli.output.view import plural, while_waiting
from llamasup.cli.target import with_client
from llamasup.core.system.text import memory_text, printable
from llamasup.errors import BuildRefused, UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.core.control.client import ControlClient

commands = command_set()

NewRuntime = Annotated[
    str | None,
    option("--runtime", "PATH", "The new llama-server, or embedded. Default: show the last upgrade."),
]
DryRun = Annotated[bool, flag("--dry-run", "Only show what would change in every plan.")]


@commands.command()
@with_client
def upgrade(
    view: View,
    client: ControlClient,
    *,
    runtime: NewRuntime = None,
    dry_run: DryRun = False,
    json: o.Json = False,
) -> None:
    """Move to another build of llama.cpp once it is proven.

    The new build answers 100 requests while the running build serves, and is compared with it. Then all
    models get it, one after the other. If crashes rise within an hour, llamasup returns to the old build.
    """
    if runtime is None:
        if dry_run:
            raise UsageInvalid("--dry-run needs a build.", remedy="Name it with --runtime PATH.")
        _show(client.upgrade_status(), json=json)
        return
    with while_waiting(view, "reading the build" if dry_run else "testing the new build"):
        answer = client.upgrade(_absolute(runtime), dry_run=dry_run)
    if dry_run:
        _show(answer, json=json)
        _refuse_problems(answer)
        return
    if json:
        write_json(answer)
    view.say("info", "control", f"All models run the build {_build(answer['runtime'])}")
    is_proven = answer["proof"]["requests"] > 0
    view.say("info", "control", f"{'Proven' if is_proven else 'Not proven'}: {answer['reason']}")
    view.say(
        "warning",
        "control",
        "To keep it after the next start, write it into the config, or point its link to it",
    )


def _refuse_problems(report: Mapping[str, Any]) -> None:
    """Raises BuildRefused, as the upgrade would."""
    without = [model for model in report["models"] if model["problem"] is not None]
    if without:
        raise BuildRefused(
            f"The build would be refused: {without[0]['id']!r} has no plan with it.",
            remedy=without[0]["problem"]["remedy"],
        )


def _absolute(runtime: str) -> str:
    """Make a path absolute: llamasup runs in another folder. A name without a folder may be on its PATH."""
    path = Path(runtime).expanduser()
    return str(path.absolute()) if "/" in runtime or path.is_file() else runtime


def _show(report: Mapping[str, Any], *, json: bool) -> None:
    write_shown(report, "\n".join(map(printable, _lines(report))), json=json)


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    if report["runtime"] is None:
        yield "There was no upgrade since llamasup started."
        return
    if report["before"] is not None:
        yield f"from   {_build(report['before'])}"
    yield f"to     {_build(report['runtime'])}"
    if report["state"] != "none":
        yield f"state  {_state(report)}"
    proof = report["proof"]
    if proof["requests"]:
        yield f"proof  {_proof(report)}"
    if report["reason"]:
        yield f"why    {report['reason']}"
    for model in report["models"]:
        yield from _model(model)


_STATES = {
    "reading": "the build is read",
    "rolling_out": "the models get the build",
    "watching": "all models run the build; crashes are counted for an hour",
    "kept": "all models run the build",
    "refused": "the build was refused; all models run the old one",
    "returning": "the models return to the old build",
    "returned": "the models have returned to the old build",
}


def _state(report: Mapping[str, Any]) -> str:
    if report["state"] == "proving":
        from llamasup.features.upgrade.verdict import MOST_REQUESTS

        return f"testing the new build ({report['proof']['requests']} of {MOST_REQUESTS} requests)"
    return _STATES.get(str(report["state"]), str(report["state"]))


def _proof(report: Mapping[str, Any]) -> str:
    proof = report["proof"]
    figures = [plural(proof["requests"], "request")]
    if proof["speed"] is not None:
        figures.append(f"{proof['speed']:.0%} of the speed")
    if proof["text"] is not None:
        figures.append(f"{proof['text']:.0%} of the text")
    return f"{report['model']}: {', '.join(figures)}"


def _model(model: Mapping[str, Any]) -> Iterator[str]:
    if model["problem"] is not None:
        yield f"{model['id']}: {model['problem']['message']}"
        return
    yield f"{model['id']}: {'no change of its flags' if not model['flags'] else 'its flags change'}"
    for change in model["flags"]:
        yield f"  {_flag(change)}"
    for device in sorted({*model["needs_before"], *model["needs_after"]}):
        before, after = model["needs_before"].get(device, 0), model["needs_after"].get(device, 0)
        if before != after:
            yield f"  {device}: {memory_text(before)} before, {memory_text(after)} after"


def _flag(change: Mapping[str, Any]) -> str:
    flag, before, after = change["flag"], change["before"], change["after"]
    if after is None:
        return f"- {flag} {before}".rstrip()
    if before is None:
        return f"+ {flag} {after}".rstrip()
    return f"{flag} {after} instead of {before}"


def _build(build: Mapping[str, str]) -> str:
    return f"{build['path']} ({build['version']})" if build["version"] else build["path"]
