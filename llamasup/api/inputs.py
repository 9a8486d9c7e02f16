"""Checks the arguments of ``serve``, and makes the config of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.config import Config, load
from llamasup.core.config.issues import ConfigIssues
from llamasup.core.config.overrides import model_entry
from llamasup.core.config.reading import read_text
from llamasup.core.hub.reference import is_reference
from llamasup.core.models.names import file_id
from llamasup.core.planning.facts import DEMO
from llamasup.core.settings.model import OF_NAME, ModelEntry
from llamasup.core.system.storage.paths import expanded
from llamasup.errors import UsageInvalid


class ConfigInputs:
    """The config, folders and models that ``serve`` was given. A call reads the config again."""

    def __init__(
        self,
        config: Path | Config | None,
        folders: tuple[Path, ...],
        environ: Mapping[str, str] | None,
        models: Mapping[str, ModelEntry],
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self.models = dict(models)
        self.file = config if isinstance(config, Path) else None
        self.folders = folders
        self._config = config if isinstance(config, Config) else Config()

    def copy(self) -> ConfigInputs:
        """A copy that later changes do not affect."""
        return ConfigInputs(self.file or self._config, self.folders, self.environ, self.models)

    def __call__(self) -> Config:
        """Read the file, if there is one (blocks). Raises ConfigInvalid."""
        return self.with_models(self.models)

    def with_models(self, models: Mapping[str, ModelEntry]) -> Config:
        """The config with these models in place of those of ``serve``."""
        config = self._config
        if self.file is not None:
            config = load(self.file, self.environ, more_models=bool(self.folders or models))
        return structs.replace(
            config,
            models_dir=(*config.models_dir, *self.folders),
            models={**config.models, **models},
        )


def config_of(config: Any, environ: Mapping[str, str], *, more_models: bool) -> Path | Config | None:
    """Return the path of a file, or a checked config. Raises UsageInvalid, and ConfigIssues for a mapping."""
    match config:
        case None:
            return None
        case Config():
            _refuse_unread(config)
            return config
        case Mapping():
            return _read(config, environ, more_models=more_models)
        case str() | PathLike():
            return absolute_of(config)
        case _:
            raise UsageInvalid(
                f"config is a {type(config).__name__}; expected the path of a file, or a dict.",
                remedy="docs/configuration.md describes the keys.",
            )


def _read(given: Mapping[Any, Any], environ: Mapping[str, str], *, more_models: bool) -> Config:
    """Check a mapping like a file: JSON is YAML."""
    try:
        text = json.dumps(_without_none(given), ensure_ascii=False, allow_nan=False, default=fspath)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageInvalid(
            f"The config has a value that a file cannot have ({error}).",
            remedy="Use strings, numbers, True and False, and dicts and lists of them.",
        ) from None
    content = text.encode("utf-8", "surrogatepass")
    reading, issues = read_text(content, "config", Path.cwd(), environ, more_models=more_models)
    if issues:
        raise ConfigIssues("config", tuple(replace(issue, line=0) for issue in issues))
    config = reading.config
    models = {name: structs.replace(entry, where="") for name, entry in config.models.items()}
    return structs.replace(config, models=models, lines={})  # there is no file


def _without_none(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {key: _without_none(value) for key, value in given.items() if value is not None}
    return given


def _refuse_unread(config: Config) -> None:
    """A Config has checked values; a dict in place of a section was not checked."""
    for section, empty in structs.asdict(Config()).items():
        value = getattr(config, section)
        if isinstance(empty, Struct) and not isinstance(value, type(empty)):
            raise _unread(section, value)
    for name, entry in config.models.items():
        if not isinstance(entry, ModelEntry):
            raise _unread(f"models[{name!r}]", entry)


def _unread(what: str, value: object) -> UsageInvalid:
    return UsageInvalid(
        f"Config: {what} is a {type(value).__name__} that was not checked.",
        remedy='Give a dict in place of the Config, as in config={"models": {"a": {"path": "a.gguf"}}}.',
    )


def absolute_of(path: str | PathLike[str]) -> Path:
    """The absolute path of a file or folder. Raises UsageInvalid."""
    return expanded(Path(path), UsageInvalid)


def entry_of(model: str | Path, options: Mapping[str, Any]) -> ModelEntry:
    """Make the entry of ``model``, as for ``llamasup run``. Raises UsageInvalid and ModelMissing."""
    text = str(model)
    if not text or "\0" in text:
        raise UsageInvalid(f"{model!r} is not a model.", remedy="Give the path of a GGUF file, or 'demo'.")
    path = expanded(text)
    if not path.exists() and isinstance(model, str):
        if text == DEMO:
            return model_entry("path", DEMO, options)
        if is_reference(text):
            return model_entry("url" if "://" in text else "repo", text, options)
    return model_entry("path", str(path), options)


def name_of(model: str | Path) -> str:
    """The default name of a model."""
    return file_id(os.fspath(model)) or "model"


def successor(entry: ModelEntry, before: ModelEntry | None, options: Mapping[str, Any]) -> ModelEntry:
    """Give ``entry`` the settings of the name from ``before`` that ``options`` does not set."""
    if before is None:
        return entry
    kept = {name: getattr(before, name) for name in ("aliases", *OF_NAME) if options.get(name) is None}
    return structs.replace(entry, **kept)
