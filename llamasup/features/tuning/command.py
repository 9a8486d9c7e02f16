"""Measures which changes of the plan are better on this machine, and keeps them (``llamasup tune``)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamasup.cli.command_group import command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.options.model import WithExtra
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_json, write_result, write_shown
from llamasup.cli.output.view import View, while_waiting
from llamasup.errors import LlamasupError, OutputFailed, UsageInvalid

if TYPE_CHECKING:
    from llamasup.core.planning.facts import Launch
    from llamasup.core.planning.measured.tuned import Kept
    from llamasup.features.tuning.report import SessionResult
    from llamasup.features.tuning.session import Options
    from llamasup.features.tuning.workload import Lengths

commands = command_set()

_PURPOSES = ("latency", "throughput", "memory")
_LONGEST_MIN = 24 * 60

For = Annotated[
    str | None,
    option("--for", "|".join(_PURPOSES), "What to improve. Default: what the profile optimizes for."),
]
Minutes = Annotated[float, option("--minutes", "N", "How long to measure at most.")]
AllowLossy = Annotated[bool, flag("--allow-lossy", "Also take changes that alter answers noticeably.")]
AccessLog = Annotated[
    Path | None, option("--access-log", "FILE", "Measure with the lengths of requests in this log.")
]
Picture = Annotated[Path | None, option("--picture", "FILE", "Write a picture of the search (SVG).")]
Show = Annotated[bool, flag("--show", "Show the kept results of this model; measure nothing.")]
Forget = Annotated[bool, flag("--forget", "Delete the kept results of this model.")]


@commands.command(cls=WithExtra)
@takes_groups
@guarded
def tune(
    view: View,
    model: o.Model,
    settings: o.ModelSettings,
    purpose: For = None,
    minutes: Minutes = 15.0,
    allow_lossy: AllowLossy = False,
    access_log: AccessLog = None,
    picture: Picture = None,
    show: Show = False,
    forget: Forget = False,
    runtime: o.RuntimeOption = None,
    json: o.Json = False,
) -> int:
    """Measure which flags make a model better here, and keep them.

    Real servers answer real requests. A change is kept only if it is proven better. Then run, serve and
    plan use it. Ctrl-C stops, and the next call continues.
    """
    from llamasup.core.models.by_name import file_of

    if show and forget:
        raise UsageInvalid("--show and --forget exclude each other.", remedy="Leave one of them out.")
    model = file_of(model)
    if show or forget:
        if forget:
            _forget(view, model, as_json=json)
        else:
            _show(view, model, settings, runtime, as_json=json)
        return 0
    options = _options(settings.profile, purpose, minutes, runtime, allow_lossy, access_log)
    with while_waiting(view, "reading the options of the runtime"):
        launch = _prepared(model, settings, options)
    found = _measure(view, launch, options, picture)
    if isinstance(found, int):
        return found
    from llamasup.features.tuning.report import report_as_json, report_lines

    path, profile = str(launch.model_path), launch.settings.profile
    shown = report_as_json(found, model=path, purpose=options.purpose, profile=profile)
    write_shown(shown, "\n".join(report_lines(found)), json=json)
    return 0


def _options(
    profile: Any,
    purpose: str | None,
    minutes: float,
    runtime: str | None,
    allow_lossy: bool,
    access_log: Path | None,
) -> Options:
    from llamasup.features.tuning.candidates import purpose_of
    from llamasup.features.tuning.session import Options

    if purpose is not None and purpose not in _PURPOSES:
        raise UsageInvalid(f"--for {purpose!r} is no purpose.", remedy=f"Use one of {', '.join(_PURPOSES)}.")
    if not 0 < minutes <= _LONGEST_MIN:
        raise UsageInvalid(
            f"--minutes {minutes:g} is out of range.", remedy=f"Give more than 0, and at most {_LONGEST_MIN}."
        )
    if profile == "plain":
        raise UsageInvalid(
            "The profile plain passes only your own flags, so there is nothing to tune.",
            remedy="Leave out --profile plain.",
        )
    chosen = purpose_of(purpose, profile)  # type: ignore[arg-type]
    if profile is not None and chosen != profile:
        raise UsageInvalid(
            f"--for {chosen} contradicts --profile {profile}.",
            remedy="Leave one of them out: a profile is tuned for its own purpose.",
        )
    mix = () if access_log is None else _lengths(access_log)
    return Options(chosen, minutes, runtime, allow_lossy, mix)


def _lengths(path: Path) -> tuple[Lengths, ...]:
    from llamasup.features.tuning.workload import lengths_in_log

    if path.exists() and not path.is_file():
        raise UsageInvalid(
            f"--access-log {path} is not a file.", remedy="Give a file that --access-log of run wrote."
        )
    try:
        with path.open("rb") as file:
            found = lengths_in_log(file)
    except OSError as error:
        raise UsageInvalid(
            f"--access-log {path}: {error.strerror}", remedy="Give a file that --access-log of run wrote."
        ) from None
    if not found:
        raise UsageInvalid(
            f"--access-log {path}: no line has the tokens of an answered request.",
            remedy="Give the access log of a llamasup that served this model, or leave the option out.",
        )
    return found


def _prepared(model: str, settings: Any, options: Options) -> Launch:
    import msgspec

    from llamasup.core.planning.facts import prepare
    from llamasup.features.tuning.candidates import default_profile

    if settings.profile is None:
        settings = msgspec.structs.replace(settings, profile=default_profile(options.purpose))
    return prepare(model, settings, runtime=options.runtime, environ=os.environ)


def _measure(view: View, launch: Launch, options: Options, picture: Path | None) -> SessionResult | int:
    """Return the result, or the exit code if a signal stopped the measurement."""
    from llamasup.cli.stop_signals import STOP_SIGNALS
    from llamasup.features.tuning.report import picture as picture_of
    from llamasup.features.tuning.tune import tune as measure

    if picture is not None and not os.access(picture.parent, os.W_OK):
        raise OutputFailed(
            f"--picture {picture}: there is no writable folder {picture.parent}.", remedy="Name another file."
        )
    signals: list[str] = []

    def on_stop(stop: Callable[[], None]) -> None:
        def deliver(name: str) -> None:
            signals.append(name)
            stop()

        STOP_SIGNALS.deliver_to(deliver)

    try:
        found = measure(launch, options, say=lambda text: view.say("info", "tune", text), on_stop=on_stop)
    finally:
        STOP_SIGNALS.raise_again()
    if found is None:
        view.say(
            "info",
            "tune",
            "Stopped. What was measured is saved: `llamasup tune` with the same options continues.",
        )
        return 128 + signal.Signals[signals[0]]
    if picture is not None:
        _write(picture, picture_of(found.search, f"{launch.model_id}: tuned for {options.purpose}"))
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputFailed(f"--picture {path}: {error.strerror}.") from None


def _forget(view: View, model: str, *, as_json: bool) -> None:
    from llamasup.core.planning.facts import read_given
    from llamasup.core.planning.measured.stores import load_results, save_results
    from llamasup.core.planning.measured.tuned import KeptResults
    from llamasup.core.system.storage.fact_cache import FileIdentity
    from llamasup.features.tuning.tune import only_tuning, store_search

    path, _ = read_given(model)
    identity = FileIdentity.of(path)
    with only_tuning(path):
        count = len(load_results(identity).results)
        save_results(identity, KeptResults())
        store_search(identity, None)
    counted = "1 result" if count == 1 else f"{count} results"
    view.say("info", "tune", f"Forgot {counted} of {path.name}.")
    if as_json:
        write_json({"model": str(path), "results": []})


def _show(view: View, model: str, settings: Any, runtime: str | None, *, as_json: bool) -> None:
    """Show the kept results, and for each whether the plan uses it now."""
    from llamasup.core.planning.facts import read_given
    from llamasup.core.planning.measured.stores import load_results
    from llamasup.core.system.storage.fact_cache import FileIdentity
    from llamasup.features.tuning.report import kept_as_json, kept_line

    path, _ = read_given(model)
    results = load_results(FileIdentity.of(path)).results
    shown = [(one, _why_not_used(one, model, settings, runtime)) for one in results]
    if as_json:
        listed = [{**kept_as_json(one), "used": not why, "why_not": why or None} for one, why in shown]
        write_json({"model": str(path), "results": listed})
    elif shown:
        lines = [
            f"{one.purpose} (profile {one.profile or 'none'}): {kept_line(one)}"
            + (f"; not used now: {why}" if why else "")
            for one, why in shown
        ]
        write_result("\n".join(lines))
    else:
        view.say("info", "tune", f"There is no kept result for {path.name}.")


def _why_not_used(kept: Kept, model: str, settings: Any, runtime: str | None) -> str:
    """Say why the plan with the profile of this result does not use it; empty if it does."""
    import msgspec

    from llamasup.core.planning.facts import prepare
    from llamasup.core.planning.measured.tuned import NO_CHANGES, why_not
    from llamasup.core.planning.planner import Planner

    of_profile = msgspec.structs.replace(settings, profile=kept.profile)
    try:
        launch = prepare(model, of_profile, runtime=runtime, environ=os.environ)
        now = Planner(launch, Path("/"), trial=NO_CHANGES).conditions()
    except LlamasupError as error:
        return error.message
    return why_not(kept, now)
