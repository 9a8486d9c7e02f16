"""What a program says of what is to be served, and the config that this makes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

from msgspec import structs

from llamasup.config import Config, load
from llamasup.config.given import model_entry
from llamasup.config.values import ModelEntry
from llamasup.core.errors import UsageInvalid
from llamasup.core.hub import is_reference
from llamasup.core.model_names import file_id
from llamasup.core.settings import FlashAttn, GpuLayers, Profile
from llamasup.effects.given_paths import expanded
from llamasup.runtime.launch import DEMO

__all__ = ["Given", "ModelArguments", "absolute_of", "entry_of", "name_of", "successor"]


class ModelArguments(TypedDict, total=False):
    """What can be said of a model: the keys of a model in a config (docs/configuration.md), times in seconds.
    None says nothing.
    """

    ctx_size: int | None
    parallel: int | None
    gpu_layers: GpuLayers | None
    threads: int | None
    kv_type: str | None
    flash_attn: FlashAttn | None
    draft_model: str | Path | None
    mmproj: str | Path | None
    profile: Profile | None
    loras: Sequence[str | Path] | None
    devices: Sequence[str] | None
    extra: Sequence[str] | None
    check_memory: bool | None
    warm_up: bool | None

    ttl_s: float | None
    pin: bool | None
    preload: bool | None
    replicas: int | None
    keep_slots: bool | None

    max_concurrent: int | None
    max_queued: int | None
    wait_timeout_s: float | None
    drain_timeout_s: float | None

    aliases: Sequence[str] | None


# Said of the name, and not of the file that is behind it at the moment.
_STAYS: Final = (
    *("aliases", "ttl_s", "pin", "preload", "replicas", "keep_slots"),
    *("max_concurrent", "max_queued", "wait_timeout_s", "drain_timeout_s"),
)


class Given:
    """The config as it is now, each time that it is asked: a file's or a value, with what was said of single
    models and folders beside it.
    """

    def __init__(
        self,
        config: str | Path | Config | None,
        folders: tuple[Path, ...],
        environ: Mapping[str, str] | None,
        models: Mapping[str, ModelEntry],
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self.models = dict(models)
        self.file = absolute_of(config) if isinstance(config, str | Path) else None
        self._config = config if isinstance(config, Config) else Config()
        self._folders = folders

    def copy(self) -> Given:
        """What is changed in the one is as it was in the other."""
        return Given(self.file or self._config, self._folders, self.environ, self.models)

    def __call__(self) -> Config:
        """Blocks for the reading of a file. Raises ConfigInvalid."""
        return self.with_models(self.models)

    def with_models(self, models: Mapping[str, ModelEntry]) -> Config:
        """As if these had been said of single models."""
        config = self._config
        if self.file is not None:
            config = load(self.file, self.environ, more_models=bool(self._folders or models))
        return structs.replace(
            config,
            models_dir=(*config.models_dir, *self._folders),
            models={**config.models, **models},
        )


def absolute_of(path: str | Path) -> Path:
    """An absolute one, of a file or a folder. Raises UsageInvalid."""
    return expanded(path, UsageInvalid)


def entry_of(model: str | Path, options: Mapping[str, Any]) -> ModelEntry:
    """``model`` as ``llamasup run`` takes it. Raises UsageInvalid, and ModelMissing for ``~nobody``."""
    text = str(model)
    if not text or "\0" in text:
        raise UsageInvalid(f"{model!r} is no model.", remedy="Give the path of a GGUF file, or 'demo'.")
    path = expanded(text)
    if not path.exists() and isinstance(model, str):
        if text == DEMO:
            return model_entry("path", DEMO, options)
        if is_reference(text):
            return model_entry("url" if "://" in text else "repo", text, options)
    return model_entry("path", str(path), options)


def name_of(model: str | Path) -> str:
    """What it is called where nobody says."""
    return file_id(os.fspath(model)) or "model"


def successor(entry: ModelEntry, before: ModelEntry | None) -> ModelEntry:
    """``entry`` in the place of ``before``: how it is started is its own; how long it stays and who may wait
    for it is as it was, where nothing else is said.
    """
    if before is None:
        return entry
    unsaid = {each: getattr(before, each) for each in _STAYS if getattr(entry, each) in (None, ())}
    return structs.replace(entry, **unsaid)
