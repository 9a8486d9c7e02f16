"""Downloads models into the models folder (``llamasup pull``)."""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import whole_number
from llamasup.cli.output.error_report import error_event, guarded, show_error
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, duration_text
from llamasup.cli.stop_signals import Interrupted
from llamasup.core.hub.hub_settings import hub_endpoint, hub_token
from llamasup.core.hub.reference import Ref, RepoRef, parse_ref
from llamasup.core.system.storage.folders import models_folder
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import memory_text, printable
from llamasup.errors import LlamasupError, UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.output.download_view import DownloadView
    from llamasup.core.hub.store import FetchedModel
    from llamasup.features.downloads.pull import DownloadOptions

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
    from llamasup.cli.output.download_view import ProgressBar, ProgressEvents, ProgressLines

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
    from llamasup.cli.output.download_view import ProgressLines
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
