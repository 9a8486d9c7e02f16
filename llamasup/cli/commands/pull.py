"""``llamasup pull`` and ``llamasup rm``: models come into the models folder, and go from it."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llamasup.cli.errors import guarded, show_error
from llamasup.cli.output.download_view import Bar, DownloadView, Events, Lines
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, duration_text
from llamasup.cli.process import STOP_SIGNALS, Interrupted
from llamasup.downloads.hub_settings import hub_endpoint, hub_token
from llamasup.downloads.pull import DownloadOptions, pull
from llamasup.downloads.reference import Ref, RepoRef, parse_ref
from llamasup.downloads.store import FetchedModel, downloaded
from llamasup.errors import LlamasupError, UsageInvalid
from llamasup.system.storage.folders import models_folder
from llamasup.system.storage.paths import expanded
from llamasup.system.text import memory_text, printable

__all__ = ["PullOptions", "have_model", "pull_command"]

REF_VARIABLE = "LLAMASUP_REF"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """What ``llamasup pull`` can be told."""

    folder: Path | None = None
    quant: str | None = None
    endpoint: str | None = None
    token_file: Path | None = None
    allow_private: bool = False
    allow_http: bool = False
    parallel: int = 4
    json: bool = False

    def for_downloads(self) -> DownloadOptions:
        """Raises UsageInvalid for an endpoint that is none, and what ``hub_token`` raises."""
        return DownloadOptions(
            folder=expanded(self.folder or models_folder(), UsageInvalid, of="--folder"),
            endpoint=hub_endpoint(os.environ, self.endpoint),
            token=hub_token(os.environ, self.token_file),
            private_addresses=self.allow_private,
            allow_http=self.allow_http,
            parallel=self.parallel,
        )


def pull_command(names: Sequence[str], options: PullOptions) -> int:
    """Download each; what is there already is not fetched again. Returns the exit code of the first error."""

    def act(view: View) -> int:
        settings = options.for_downloads()
        # A service hands over what it wants like this: a URL may hold a signature, and ps shows arguments.
        given = (os.environ.get(REF_VARIABLE, "") if name == "-" else name for name in names)
        codes = [_pull_one(name, options, settings, view) for name in given]
        return next(filter(None, codes), 0)

    return guarded(act)


def _pull_one(name: str, options: PullOptions, settings: DownloadOptions, view: View) -> int:
    events = Events(name) if options.json else None
    began_s = time.monotonic()
    try:
        ref = _ref(name, options.quant, settings.endpoint)
        shown: DownloadView = events or (Bar() if sys.stderr.isatty() else Lines(view, live=False))
        with shown:
            model = _downloaded(ref, settings, shown, view)
    except LlamasupError as error:
        if events is not None:
            events.event(
                "error",
                cause=error.cause,
                message=error.message,
                remedy=error.remedy,
                details=list(error.details),
                exit_code=error.exit_code,
            )
        return show_error(view, error)
    if events is not None:
        events.event(
            "done",
            path=str(model.path),
            parts=[str(each) for each in model.parts],
            mmproj=None if model.mmproj is None else str(model.mmproj),
            seconds=round(time.monotonic() - began_s, 3),
        )
    else:
        _say(view, _summary(ref, model, shown, time.monotonic() - began_s))
        write_result(str(model.path))
    return 0


def _ref(name: str, quant: str | None, endpoint: str) -> Ref:
    ref = parse_ref(name, endpoint)
    if ref is None:
        raise UsageInvalid(
            f"{printable(name)!r} is nothing that can be downloaded.",
            remedy="Give org/repo, org/repo:QUANT, org/repo:FILE.gguf, or the https URL of a .gguf file.",
        )
    if quant is None:
        return ref
    if not isinstance(ref, RepoRef) or ref.quant or ref.file:
        raise UsageInvalid(
            f"--quant {printable(quant)} and {ref} say both what is meant.", remedy="Leave one out."
        )
    return replace(ref, quant=quant)


def _downloaded(ref: Ref, settings: DownloadOptions, shown: DownloadView, view: View) -> FetchedModel:
    """As ``pull``, ended by a signal. Raises Interrupted then, having said what is kept."""
    try:
        return _interruptible(pull(ref, settings, shown))
    except Interrupted:
        kept = f": {memory_text(shown.done_bytes)} are kept" if shown.done_bytes else ""
        shown.say(f"Stopped{kept}; the same command goes on from there.")
        raise


def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; a signal cancels it, and raises Interrupted when it has cleaned up."""
    heard: list[str] = []

    async def act() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def hear(name: str) -> None:
            heard.append(name)
            loop.call_soon_threadsafe(task.cancel)

        STOP_SIGNALS.deliver_to(hear)
        try:
            return await work
        finally:
            STOP_SIGNALS.raise_again()

    try:
        return asyncio.run(act())
    except asyncio.CancelledError:
        name = heard[0] if heard else "SIGINT"
        is_signal = name in signal.Signals.__members__
        raise Interrupted(
            signal.Signals[name] if is_signal else signal.SIGTERM, "" if is_signal else name
        ) from None


def _summary(ref: Ref, model: FetchedModel, shown: DownloadView, seconds: float) -> str:
    name = str(ref)  # of a URL without its query: it is found by that, and that may be seen
    size = sum(each.stat().st_size for each in model.parts)
    parts = f" in {len(model.parts)} parts" if len(model.parts) > 1 else ""
    mmproj = f", and {model.mmproj.name}" if model.mmproj else ""
    return (
        f"{printable(name)}: {model.path.name}, {memory_text(size)}{parts}{mmproj}, checked; "
        f"{duration_text(seconds)}\n  → llamasup run {shlex.quote(name)}"
    )


def _say(view: View, text: str) -> None:
    view.say("info", "download", text)


def have_model(name: str, view: View) -> None:
    """Before a model is served that is named by a reference: have it in the models folder.

    What is there is used as it is, without asking anybody. Raises what ``pull`` raises.
    """
    if not name.startswith(("http://", "https://")) and Path(name).expanduser().exists():
        return
    endpoint = hub_endpoint(os.environ)
    ref = parse_ref(name, endpoint)
    if ref is None or downloaded(ref, models_folder()) is not None:
        return
    settings = PullOptions().for_downloads()
    began_s = time.monotonic()
    with Lines(view, live=sys.stderr.isatty()) as shown:
        model = _downloaded(ref, settings, shown, view)
    _say(view, f"Downloaded {model.path.name} in {duration_text(time.monotonic() - began_s)}")
