"""Gathers the facts for a plan: runtime, model, the files next to the model, and its RPC workers. Blocks.

:mod:`llamasup.core.planning.projectors` decides which files belong to the model.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from zlib import crc32

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.gguf.files import read_model
from llamasup.core.hub.reference import is_reference, parse_ref
from llamasup.core.llama_server.argv_builder import read_extra, with_absolute_paths
from llamasup.core.llama_server.inspect import Runtime, find_runtime
from llamasup.core.llama_server.rpc.workers import (
    NO_WORKERS,
    TunnelFiles,
    WorkerAnswer,
    Workers,
    choose_workers,
    missing_error,
    need_every_worker,
    why_excluded,
)
from llamasup.core.planning.drafting import extra_draft_path
from llamasup.core.planning.projectors import (
    SEEING,
    Pairing,
    chosen_by_user,
    has_projector_name,
    is_of_quantization,
    pairings_of,
    place_of,
)
from llamasup.core.settings.model import Settings
from llamasup.core.settings.names import names_of
from llamasup.core.system.process.run_folder import private_runtime_folder
from llamasup.core.system.storage.fact_cache import FileIdentity
from llamasup.core.system.storage.folders import atomic_write, cache_folder, models_folder
from llamasup.core.system.storage.paths import PathKind, expanded, path_kind
from llamasup.core.system.text import split_row
from llamasup.errors import FolderUnusable, ModelInvalid, ModelMissing, UsageInvalid

_MAX_ENTRIES = 10_000  # of the folder; listing them takes about 10 ms
_MAX_PROJECTORS = 32  # whose headers are read, later from the cache


def _snapshots(folder: Path) -> list[Path]:
    """The folder, and in the hub's cache the same one of other revisions."""
    place = place_of(folder)
    if place == folder:
        return [folder]
    revision = place.parts.index("*")
    top, below = Path(*place.parts[:revision]), place.parts[revision + 1 :]
    return [folder, *(found for each in _folders([top]) if (found := each.joinpath(*below)) != folder)]


def _folders(tops: Iterable[Path]) -> list[Path]:
    return [entry for top in tops for entry in _entries(top) if entry.is_dir()]


def _names_in(folders: Iterable[Path]) -> list[Path]:
    """The model files of these folders."""
    return [entry for folder in folders for entry in _entries(folder) if entry.name.lower().endswith(".gguf")]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(islice(folder.iterdir(), _MAX_ENTRIES))
    except OSError:
        return []


NO_PROJECTOR = "none"


class Launch(Struct, frozen=True):
    """Everything that is known before the first start of one model. Paths in ``settings`` are absolute."""

    model_id: str
    aliases: tuple[str, ...]  # other names that clients may use
    model_path: Path
    model: ModelFacts
    draft: ModelFacts | None
    mmproj: ModelFacts | None
    runtime: Runtime
    settings: Settings
    environ: Mapping[str, str]
    found: Pairing | None = None  # the projector in the model's folder, if the user sets none

    @property
    def sees(self) -> bool:
        """Whether the model has a projector, and so reads images (or sound)."""
        return self.mmproj is not None or (self.found is not None and self.found.projector is not None)


def with_name(launch: Launch, model: str) -> Launch:
    """Return ``launch`` under another model name."""
    return replace(launch, model_id=model, settings=structs.replace(launch.settings, alias=model))


def prepare(
    model: str,
    settings: Settings,
    *,
    runtime: str | None,
    environ: Mapping[str, str],
    pair: Callable[[Path, ModelFacts], Pairing | None] | None = None,
) -> Launch:
    """Find and read everything that a plan needs. ``pair`` finds the projector if the user sets none; by
    default, it searches the model's folder.

    Raises ModelMissing, ModelInvalid, RuntimeMissing or UsageInvalid.
    """
    path, facts = read_given(model)
    search_folder = settings.mmproj is None
    settings = structs.replace(
        settings,
        draft_model=_absolute("--draft-model", settings.draft_model),
        mmproj=_absolute("--mmproj", None if settings.mmproj == NO_PROJECTOR else settings.mmproj),
        rpc_ca=_absolute("--rpc-ca", settings.rpc_ca),
        rpc_cert=_absolute("--rpc-cert", settings.rpc_cert),
        rpc_key=_absolute("--rpc-key", settings.rpc_key),
    )
    found = find_runtime(runtime, environ)
    # The child runs in another folder, where a relative path would not work.
    extra = with_absolute_paths(found.capabilities, settings.extra, lambda name: str(expanded(name)))
    extra_args = read_extra(found.capabilities, extra)
    draft = _read_attachment("--spec-draft-model", extra_draft_path(extra_args)) or _read_attachment(
        "--draft-model", settings.draft_model
    )
    mmproj = _read_attachment("--mmproj", extra_args.value("--mmproj") or settings.mmproj)
    names = names_of(str(path), settings.alias)
    return Launch(
        model_id=names.name,
        aliases=names.aliases,
        model_path=path,
        model=facts,
        draft=draft,
        mmproj=mmproj,
        runtime=found,
        settings=structs.replace(settings, extra=extra),
        environ=environ,
        found=(pair or sibling_projector)(path, facts)
        if search_folder and not chosen_by_user(extra_args)
        else None,
    )


def attachments(launch: Launch) -> tuple[FileIdentity, ...]:
    """Read the states of the other files that are loaded: draft, projector, adapters."""
    settings = launch.settings
    paths = [settings.draft_model, settings.mmproj, *settings.adapters]
    if launch.found is not None and launch.found.projector is not None:
        paths.append(launch.found.projector.path)
    # A scale may follow the path of an adapter.
    for part in (part for word in settings.extra for part in split_row(word)):
        end = part.lower().rfind(".gguf")
        paths.append(part[: end + len(".gguf")] if end >= 0 else None)
    return tuple(filter(None, map(FileIdentity.find, filter(None, paths))))  # the start reports the others


def sibling_projector(path: Path, model: ModelFacts) -> Pairing | None:
    """The projector in the folder of the model at ``path``, or above it, for a start without ``--mmproj``.

    Only files with "mmproj" in their names are read, and unreadable ones are skipped.
    """
    if model.model_class not in SEEING:
        return None
    folders = _snapshots(path.parent)
    if is_of_quantization(path.parent):
        above = _snapshots(path.parent.parent)
        folders += [*above, *filter(is_of_quantization, _folders(above))]
    files = [str(file) for file in _names_in(dict.fromkeys(folders))]
    models = {str(path): model}
    for file in list(filter(has_projector_name, files))[:_MAX_PROJECTORS]:
        with suppress(ModelInvalid, ModelMissing):
            models[file] = read_model(file)
    return pairings_of(models, (file for file in files if file not in models)).get(str(path))


def read_given(model: str) -> tuple[Path, ModelFacts]:
    """The file of MODEL and its facts. Raises ModelMissing, ModelInvalid or UsageInvalid."""
    path = find_model(model)
    facts = read_model(path)
    _refuse_foreign_byte_order(path, facts)
    return path, facts


def _refuse_foreign_byte_order(path: Path, facts: ModelFacts) -> None:
    """Refuse a file of another byte order, which b11434 reports as "file version … is extremely large"."""
    if facts.big_endian != (sys.byteorder == "big"):
        order = "big" if facts.big_endian else "little"
        raise ModelInvalid(
            f"{path}: the file is {order}-endian, and this machine is {sys.byteorder}-endian",
            remedy="Get the file for this kind of machine, or convert it with gguf-convert-endian.",
        )


def find_model(name: str) -> Path:
    """The file of MODEL. Raises ModelMissing or UsageInvalid."""
    if not name:
        raise UsageInvalid("MODEL is empty.", remedy="Give the path of a GGUF file, or 'demo'.")
    if name.startswith(("http://", "https://")):
        return _downloaded(name)  # not a path, and with a signature too long for one
    path = expanded(name)
    if name == DEMO and path_kind(path) is not PathKind.FILE:
        return demo_file()
    if _exists(path):
        return path
    if is_reference(name):
        return _downloaded(name)
    return path  # read_model reports the error and similar names


def _downloaded(name: str) -> Path:
    from llamasup.core.hub.store import downloaded, hub_endpoint

    ref = parse_ref(name, hub_endpoint(os.environ))
    found = None if ref is None else downloaded(ref, models_folder())
    if found is None:
        raise ModelMissing(
            f"{ref} is neither a file here nor downloaded.",
            remedy=f"Download it: llamasup pull {shlex.quote(str(ref))}",
        )
    return found.path


def _exists(path: Path) -> bool:
    """Whether ``path`` exists, or fails with an error that read_model can report."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _absolute(option: str, name: str | None) -> str | None:
    if name is None:
        return None
    with _naming_option(option):
        return str(expanded(name))


def _read_attachment(option: str, path: str | None) -> ModelFacts | None:
    """The facts of a file that belongs to the model. Errors name the option that set it."""
    if path is None:
        return None
    with _naming_option(option):
        facts = read_model(path)
        _refuse_foreign_byte_order(Path(path), facts)
        return facts


@contextmanager
def _naming_option(option: str) -> Iterator[None]:
    try:
        yield
    except (ModelMissing, ModelInvalid) as error:
        raise type(error)(f"{option}: {error.message}", remedy=error.remedy) from None


# --- RPC workers ----------------------------------------------------------------------------------


def find_workers(launch: Launch, *, is_start: bool) -> Workers:
    """Find the RPC workers of the settings.

    Raises UsageInvalid if the settings or the build allow none, and WorkerMissing.
    """
    settings, capabilities = launch.settings, launch.runtime.capabilities
    if not settings.rpc:
        return NO_WORKERS
    if not capabilities.knows("--rpc"):
        raise UsageInvalid(
            f"rpc is not supported: this llama-server ({capabilities.version}) was built without RPC.",
            remedy="Use a llama-server with --rpc (a build with GGML_RPC=ON), or leave rpc out.",
        )
    if (settings.replicas or 1) > 1:
        raise UsageInvalid(
            f"rpc and replicas: {settings.replicas} exclude each other: a worker has one client.",
            remedy="Leave replicas out, or give each of several names its own workers.",
        )
    extra_args = read_extra(capabilities, settings.extra)
    if excluded := why_excluded(extra_args, settings.gpu_layers):
        return Workers(excluded=excluded)
    workers = choose_workers(ask_workers(launch, settings.rpc, is_start=is_start), is_start=is_start)
    if workers.missing and need_every_worker(extra_args):
        raise missing_error(launch.model_id, workers, fits=True)
    return workers


def ask_workers(
    launch: Launch, workers: Sequence[str], *, is_start: bool, again: bool = False
) -> tuple[WorkerAnswer, ...]:
    """Ask the RPC workers. A start has more patience, and tries a worker that is not ready twice."""
    from llamasup.core.llama_server.rpc import ask  # here, to keep the start short

    settings = launch.settings
    files = None
    if settings.rpc_ca and settings.rpc_cert and settings.rpc_key:
        files = TunnelFiles(settings.rpc_ca, settings.rpc_cert, settings.rpc_key)
    return ask.ask_workers(
        launch.runtime,
        launch.environ,
        workers,
        files,
        again=again,
        timeout_s=ask.START_TIMEOUT_S if is_start else ask.ESTIMATE_TIMEOUT_S,
        attempts=2 if is_start and not again else 1,
    )


# --- the demo model ------------------------------------------------------------------------------

DEMO = "demo"
# Of ``demo_model()``. Reading that file as well, and importing what reads it, would take 10 ms of each start.
DEMO_CRC32 = 0x4298073E


def demo_file() -> Path:
    """The demo model, written once into the cache folder, or for this login if that cannot be used."""
    try:
        return _demo_in(cache_folder())
    except FolderUnusable:
        return _demo_in(private_runtime_folder())


def _demo_in(folder: Path) -> Path:
    path = folder / "demo.gguf"
    try:
        if not path.exists() or crc32(path.read_bytes()) != DEMO_CRC32:
            atomic_write(path, demo_model())
    except OSError as error:
        raise FolderUnusable(
            f"{path}: the demo model cannot be written: {error.strerror}",
            remedy="Free space on this disk, or remove what blocks this path; or use your own model.",
        ) from None
    return path


def demo_model() -> bytes:
    """Return the file of the demo model. Raises FileNotFoundError if the installation is incomplete."""
    return _trained("demo.gguf")


def demo_draft() -> bytes:
    """Return the file of a draft for the demo model, of a tenth of its size."""
    return _trained("demo-draft.gguf")


def _trained(name: str) -> bytes:
    from importlib.resources import files

    return (files("llamasup.core.gguf") / "trained" / name).read_bytes()
