"""Downloads models into the models folder (``llamasup pull``)."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import whole_number
from llamasup.cli.output.error_report import error_event, guarded, show_error
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, duration_text
from llamasup.cli.stop_signals import Interrupted
from llamasup.core.hub.reference import Ref, RepoRef, parse_ref
from llamasup.core.hub.store import hub_endpoint, hub_token
from llamasup.core.system.storage.folders import models_folder
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import json_text, memory_text, printable
from llamasup.errors import LlamasupError, UsageInvalid

if TYPE_CHECKING:
    from llamasup.core.hub.store import FetchedModel
    from llamasup.features.downloads.pull import Choosing, DownloadOptions

commands = command_set()

REF_VARIABLE = "LLAMASUP_REF"

_MAX_PARALLEL = 16  # more connections from one address are too many for a hub's servers


Refs = Annotated[
    list[str],
    argument("REF...", "org/repo, org/repo:QUANT, org/repo:FILE.gguf, or the https URL of a .gguf file."),
]
Quant = Annotated[
    str | None,
    option(
        "--quant", "QUANT", "The quantization, as in org/repo:QUANT. Default: Q4_K_M, or the nearest one."
    ),
]
Endpoint = Annotated[str | None, option("--endpoint", "URL", "Another hub or a mirror. Env: $HF_ENDPOINT.")]
TokenFile = Annotated[
    Path | None, option("--token-file", "PATH", "File with the hub's token. Env: $HF_TOKEN.")
]
AllowPrivate = Annotated[bool, flag("--allow-private", "Also download from private network addresses.")]
AllowHttp = Annotated[
    bool, flag("--allow-http", "Also download over plain http, which others can tamper with.")
]
Parallel = Annotated[
    int,
    option(
        "--parallel",
        "N",
        "Number of parallel requests for one file.",
        read=partial(whole_number, minimum=1, maximum=_MAX_PARALLEL),
    ),
]


@commands.command()
@guarded
def pull(
    view: View,
    refs: Refs,
    *,
    folder: o.ModelsFolder = None,
    quant: Quant = None,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    allow_private: AllowPrivate = False,
    allow_http: AllowHttp = False,
    parallel: Parallel = 4,
    json: o.Json = False,
) -> int:
    """Download models from Hugging Face or from an https URL.

    An interrupted download continues where it stopped. Complete files are not downloaded again.
    """
    settings = download_options(folder, endpoint, token_file, allow_private, allow_http, parallel)
    # A service passes a reference in the environment: ps shows arguments, and a URL may contain a secret.
    names = (os.environ.get(REF_VARIABLE, "") if ref == "-" else ref for ref in refs)
    codes = [_pull_one(name, quant, settings, view, json=json) for name in names]
    return next(filter(None, codes), 0)


def download_options(
    folder: Path | None = None,
    endpoint: str | None = None,
    token_file: Path | None = None,
    allow_private: bool = False,
    allow_http: bool = False,
    parallel: int = 4,
) -> DownloadOptions:
    """Check the options. Raises UsageInvalid for a wrong folder or endpoint, and errors of ``hub_token``."""
    from llamasup.features.downloads.pull import DownloadOptions

    return DownloadOptions(
        folder=expanded(folder or models_folder(), UsageInvalid, of="--folder"),
        endpoint=hub_endpoint(os.environ, endpoint),
        token=hub_token(os.environ, token_file),
        private_addresses=allow_private,
        allow_http=allow_http,
        parallel=parallel,
    )


def _pull_one(name: str, quant: str | None, settings: DownloadOptions, view: View, *, json: bool) -> int:

    events = ProgressEvents(name) if json else None
    began_s = time.monotonic()
    try:
        ref = _ref(name, quant, settings.endpoint)
        progress = events or (ProgressBar() if sys.stderr.isatty() else ProgressLines(view, live=False))
        with closing(progress):
            model = _downloaded(ref, settings, progress)
    except LlamasupError as error:
        if events is not None:
            events.event("error", **error_event(error))
        return show_error(view, error)
    if events is not None:
        events.event(
            "done",
            path=str(model.path),
            parts=[str(part) for part in model.parts],
            mmproj=None if model.mmproj is None else str(model.mmproj),
            seconds=round(time.monotonic() - began_s, 3),
        )
    else:
        _say(view, _summary(ref, model, time.monotonic() - began_s))
        write_result(str(model.path))
    return 0


def _ref(name: str, quant: str | None, endpoint: str) -> Ref:
    ref = parse_ref(name, endpoint)
    if ref is None:
        raise UsageInvalid(
            f"{printable(name)!r} is not a model reference.",
            remedy="Give org/repo, org/repo:QUANT, org/repo:FILE.gguf, or the https URL of a .gguf file.",
        )
    if quant is None:
        return ref
    if not isinstance(ref, RepoRef) or ref.quant or ref.file:
        raise UsageInvalid(
            f"--quant {printable(quant)} and {ref}: the quantization or file is given twice.",
            remedy="Leave out --quant, or give only org/repo.",
        )
    return replace(ref, quant=quant)


def _downloaded(ref: Ref, settings: DownloadOptions, progress: DownloadView) -> FetchedModel:
    """Download ``ref``. After a signal, shows the size of the partial file and raises Interrupted."""
    from llamasup.cli.interruptible import interruptible
    from llamasup.features.downloads.pull import pull as download

    try:
        return interruptible(download(ref, settings, progress))
    except Interrupted:
        kept = f"; {memory_text(progress.done_bytes)} are kept" if progress.done_bytes else ""
        progress.say(f"Stopped{kept}. Run the same command to continue.")
        raise


def _summary(ref: Ref, model: FetchedModel, seconds: float) -> str:
    name = str(ref)  # without the query of a URL, which may contain a secret
    size = sum(part.stat().st_size for part in model.parts)
    parts = f" in {len(model.parts)} parts" if len(model.parts) > 1 else ""
    mmproj = f", and {model.mmproj.name}" if model.mmproj else ""
    return (
        f"{printable(name)}: {model.path.name}, {memory_text(size)}{parts}{mmproj}, verified, "
        f"{duration_text(seconds)}\n  → llamasup run {shlex.quote(name)}"
    )


def _say(view: View, text: str) -> None:
    view.say("info", "download", text)


def ensure_downloaded(name: str, view: View) -> None:
    """Download the model that ``name`` refers to, unless it is a file or in the models folder.

    A downloaded model is used without a request to the hub. Raises the errors of ``downloads.pull``.
    """
    from llamasup.core.hub.store import downloaded

    if not name.startswith(("http://", "https://")) and Path(name).expanduser().exists():
        return
    endpoint = hub_endpoint(os.environ)
    ref = parse_ref(name, endpoint)
    if ref is None or downloaded(ref, models_folder()) is not None:
        return
    settings = download_options()
    began_s = time.monotonic()
    with closing(ProgressLines(view, live=sys.stderr.isatty())) as progress:
        model = _downloaded(ref, settings, progress)
    _say(view, f"Downloaded {model.path.name} in {duration_text(time.monotonic() - began_s)}")


# --- progress --------------------------------------------------------------------------------

_LINE_INTERVAL_S = 10.0
_NAME_COLUMNS = 24  # the bar takes the rest


class DownloadView:
    """The ProgressListener of one download. ``say`` shows a message; ``close`` removes the progress."""

    interval_s = 0.25

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.done_bytes = 0
        self.choosing: Choosing | None = None
        self._began_s = 0.0
        self._bytes_at_start = 0
        self._shown_s = 0.0

    def close(self) -> None:
        pass

    def chosen(self, choosing: Choosing) -> None:
        self.choosing = choosing
        size = "" if choosing.size_bytes is None else f", {memory_text(choosing.size_bytes)}"
        self.say(f"{choosing.name}{size}: {choosing.reason}")
        for note in choosing.notes:
            self.say(f"{choosing.name}: {note}")

    def moved(self, done_bytes: int) -> None:
        now_s = time.monotonic()
        if not self._began_s:
            self._began_s, self._bytes_at_start = now_s, done_bytes
        self.done_bytes = done_bytes
        if now_s - self._shown_s >= self.interval_s:
            self._shown_s = now_s
            self._progress(now_s)

    def _progress(self, now_s: float) -> None:
        raise NotImplementedError

    def _bytes_per_s(self, now_s: float) -> float:
        taken_s = now_s - self._began_s
        return (self.done_bytes - self._bytes_at_start) / taken_s if taken_s > 0 else 0.0

    def _text(self, now_s: float) -> str:
        name, size = (self.choosing.name, self.choosing.size_bytes) if self.choosing else ("", None)
        per_s = self._bytes_per_s(now_s)
        parts = [f"downloading {name}: {memory_text(self.done_bytes)}"]
        if size:
            parts[0] = f"downloading {name}: {100 * self.done_bytes // size} % of {memory_text(size)}"
        if per_s:
            parts.append(f"{memory_text(round(per_s))}/s")
            if size:
                parts.append(f"{duration_text((size - self.done_bytes) / per_s)} left")
        return ", ".join(parts)


class ProgressLines(DownloadView):
    """The live line of ``view`` on a terminal, otherwise a line every ten seconds."""

    def __init__(self, view: View, *, live: bool) -> None:
        super().__init__(lambda text: view.say("info", "download", text))
        self._view = view
        self._live = live
        if not live:
            self.interval_s, self._shown_s = _LINE_INTERVAL_S, time.monotonic()

    def close(self) -> None:
        if self._live:
            self._view.show_activity(None)

    def _progress(self, now_s: float) -> None:
        (self._view.show_activity if self._live else self.say)(self._text(now_s))


class ProgressEvents(DownloadView):
    """One JSON object a line on standard output."""

    def __init__(self, ref: str) -> None:
        super().__init__(lambda text: self.event("note", text=text))
        self._ref = ref

    def event(self, name: str, /, **fields: Any) -> None:
        write_result(json_text({"event": name, "protocol": 1, "ref": self._ref, **fields}))

    def chosen(self, choosing: Choosing) -> None:
        self.choosing = choosing
        self.event(
            "chosen",
            name=choosing.name,
            files=list(choosing.files),
            total_bytes=choosing.size_bytes,
            missing=choosing.missing,
            reason=choosing.reason,
            notes=list(choosing.notes),
        )

    def _progress(self, now_s: float) -> None:
        self.event(
            "progress",
            done_bytes=self.done_bytes,
            total_bytes=self.choosing.size_bytes if self.choosing else None,
            bytes_per_s=round(self._bytes_per_s(now_s)),
        )


class ProgressBar(DownloadView):
    """A bar with speed and remaining time, drawn by a thread of rich, which only this class imports."""

    interval_s = 0.0  # rich draws at its own pace

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
            expand=True,
        )
        self._task: Any = None
        console = self._bar.console
        super().__init__(
            lambda text: console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
        )
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()

    def _progress(self, now_s: float) -> None:
        if self._task is None:
            name = self.choosing.name if self.choosing else ""
            short = name if len(name) <= _NAME_COLUMNS else "…" + name[1 - _NAME_COLUMNS :]
            size = self.choosing.size_bytes if self.choosing else None
            self._task = self._bar.add_task(printable(short), total=size, completed=self.done_bytes)
        else:
            self._bar.update(self._task, completed=self.done_bytes)
