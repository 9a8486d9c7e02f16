"""Gathers the facts for a plan: runtime, model, machine, and the files next to the model. Starts nothing.

Which files belong to the model is decided in :mod:`llamasup.planning.projectors`; models of folders are
paired with the found files of the folder (:mod:`llamasup.models.attachments`).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from llamasup.downloads.reference import is_reference, parse_ref
from llamasup.errors import FolderUnusable, ModelInvalid, ModelMissing, UsageInvalid
from llamasup.gguf.files import read_model
from llamasup.gguf.header import ModelClass, ModelFacts
from llamasup.llama_server.flags import read_extra, with_absolute_paths
from llamasup.llama_server.inspect import Runtime, find_runtime
from llamasup.llama_server.settings import Settings, names_of
from llamasup.planning.drafting import draft_path_by_hand
from llamasup.planning.projectors import Candidate, Pairing, pair_projector, unwanted
from llamasup.system.storage.folders import atomic_write, cache_folder, models_folder
from llamasup.system.storage.paths import expanded

__all__ = [
    "DEMO",
    "Launch",
    "demo_file",
    "find_model",
    "named",
    "prepare",
    "projector_beside",
    "projectors_beside",
    "read_given",
]


_MAX_ENTRIES = 10_000  # of the folder; listing them takes some 10 ms
_MAX_PROJECTORS = 32  # headers that are read, each once and then from the cache


def projectors_beside(model: Path, *, cache_folder: Path | None = None) -> tuple[list[Candidate], list[str]]:
    """The projectors in the model's folder, and the names of the other model files there.

    Only files that are called so ("mmproj") are looked into; one that cannot be read is none.
    """
    try:
        with os.scandir(model.parent) as entries:
            names = sorted(
                entry.name
                for entry in islice(entries, _MAX_ENTRIES)
                if entry.name.lower().endswith(".gguf") and entry.name != model.name
            )
    except OSError:
        return [], []
    projectors = [name for name in names if "mmproj" in name.lower()]
    candidates = []
    for name in projectors[:_MAX_PROJECTORS]:
        path = model.parent / name
        try:
            facts = read_model(path, cache_folder=cache_folder)
        except (ModelInvalid, ModelMissing):
            continue
        if facts.model_class is ModelClass.PROJECTOR:
            candidates.append(Candidate(str(path), facts))
    return candidates, [name for name in names if name not in projectors]


DEMO = "demo"
NO_PROJECTOR = "none"


@dataclass(frozen=True, slots=True)
class Launch:
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
    found: Pairing | None = None  # the projector beside the model, where nothing is said about one

    @property
    def sees(self) -> bool:
        """Whether it has a projector: it takes images (or sound)."""
        return self.mmproj is not None or (self.found is not None and self.found.projector is not None)


def named(launch: Launch, model: str) -> Launch:
    """The same under another name."""
    return replace(launch, model_id=model, settings=replace(launch.settings, alias=model))


def prepare(
    model: str,
    settings: Settings,
    *,
    runtime: str | None,
    environ: Mapping[str, str],
    pair: Callable[[Path, ModelFacts], Pairing | None] | None = None,
) -> Launch:
    """Find and read everything that a plan needs. ``pair`` says which projector is the model's where nothing
    is said about one: the one that lies beside it.

    Raises ModelMissing, ModelInvalid, RuntimeMissing or UsageInvalid; nothing has been started then.
    """
    path, facts = read_given(model)
    look_beside = settings.mmproj is None
    settings = replace(
        settings,
        draft_model=_absolute("--draft-model", settings.draft_model),
        mmproj=_absolute("--mmproj", None if settings.mmproj == NO_PROJECTOR else settings.mmproj),
    )
    found = find_runtime(runtime, environ)
    # The child runs in a folder of its own, where a relative path would mean something else.
    extra = with_absolute_paths(found.capabilities, settings.extra, lambda name: str(expanded(name)))
    extra_args = read_extra(found.capabilities, extra)
    draft = _read_beside("--spec-draft-model", draft_path_by_hand(extra_args)) or _read_beside(
        "--draft-model", settings.draft_model
    )
    mmproj = _read_beside("--mmproj", extra_args.value("--mmproj") or settings.mmproj)
    names = names_of(str(path), settings.alias)
    return Launch(
        model_id=names.name,
        aliases=names.aliases,
        model_path=path,
        model=facts,
        draft=draft,
        mmproj=mmproj,
        runtime=found,
        settings=replace(settings, extra=extra),
        environ=environ,
        found=(pair or projector_beside)(path, facts) if look_beside and not unwanted(extra_args) else None,
    )


def projector_beside(path: Path, model: ModelFacts) -> Pairing | None:
    """The projector that the model at ``path`` is started with by itself where nothing is said about one."""
    if model.model_class is not ModelClass.DECODER:
        return None
    candidates, neighbours = projectors_beside(path)
    return pair_projector(model, str(path), candidates, neighbours)


def read_given(model: str) -> tuple[Path, ModelFacts]:
    """The file that MODEL means and its facts. Raises ModelMissing, ModelInvalid or UsageInvalid."""
    path = find_model(model)
    facts = read_model(path)
    _refuse_foreign_byte_order(path, facts)
    return path, facts


def _refuse_foreign_byte_order(path: Path, facts: ModelFacts) -> None:
    """b11434 says "file version 50331648 is extremely large, is there a mismatch between endianness?"."""
    if facts.big_endian != (sys.byteorder == "big"):
        order = "big" if facts.big_endian else "little"
        raise ModelInvalid(
            f"{path}: is written for {order}-endian machines, and this one is {sys.byteorder}-endian",
            remedy="Get the file for this kind of machine, or turn it with gguf-convert-endian.",
        )


def find_model(name: str) -> Path:
    """The file that MODEL means. Raises ModelMissing or UsageInvalid."""
    if not name:
        raise UsageInvalid("MODEL is empty.", remedy="Give the path of a GGUF file, or 'demo'.")
    if name.startswith(("http://", "https://")):
        return _downloaded(name)  # no path, and with a signature too long for one
    path = expanded(name)
    if name == DEMO and not _is_file(path):
        return demo_file()
    if _is_there(path):
        return path
    if is_reference(name):
        return _downloaded(name)
    return path  # read_model says what is wrong with it, and what is near


def _downloaded(name: str) -> Path:
    from llamasup.downloads.hub_settings import hub_endpoint
    from llamasup.downloads.store import downloaded

    ref = parse_ref(name, hub_endpoint(os.environ))
    found = None if ref is None else downloaded(ref, models_folder())
    if found is None:
        raise ModelMissing(
            f"{ref} is no file here, and it has not been downloaded.",
            remedy=f"Download it: llamasup pull {shlex.quote(str(ref))}",
        )
    return found.path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    """Whether something is there, or on the way there, about which read_model can say what is wrong."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def demo_file() -> Path:
    """The demo model, written once into the cache folder."""
    from llamasup.gguf.demo import demo_model

    content = demo_model()
    path = cache_folder() / "demo.gguf"
    try:
        if not path.exists() or path.read_bytes() != content:
            atomic_write(path, content)
    except OSError as error:
        raise FolderUnusable(
            f"{path}: the demo model cannot be written: {error.strerror}",
            remedy="Make room there, or remove what is in its place; or give a model of your own.",
        ) from None
    return path


def _absolute(option: str, name: str | None) -> str | None:
    if name is None:
        return None
    with _naming(option):
        return str(expanded(name))


def _read_beside(option: str, path: str | None) -> ModelFacts | None:
    """A file that belongs to the model; what is wrong with it names the option that gave it."""
    if path is None:
        return None
    with _naming(option):
        facts = read_model(path)
        _refuse_foreign_byte_order(Path(path), facts)
        return facts


@contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except (ModelMissing, ModelInvalid) as error:
        raise type(error)(f"{option}: {error.message}", remedy=error.remedy) from None
