"""Checks the arguments of ``serve`` like the keys of a config, and makes a config from the arguments."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import ConfigIssues, shown
from llamasup.core.config.reading import load, read_text
from llamasup.core.hub.reference import is_reference
from llamasup.core.models.names import file_id
from llamasup.core.planning.facts import DEMO
from llamasup.core.settings.declaration import Setting, settings_of
from llamasup.core.settings.kinds import Boolean, FilePath, Integer, IntegerOr, InvalidValue, Many, Time
from llamasup.core.settings.model import OF_NAME, ModelEntry
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import did_you_mean
from llamasup.errors import UsageInvalid
from llamasup.features import config_keys


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
            config = load(self.file, self.environ, config_keys(), more_models=bool(self.folders or models))
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
    reading, issues = read_text(
        content, "config", Path.cwd(), environ, config_keys(), more_models=more_models
    )
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
    for key in config_keys():
        value = config.of(key)
        if isinstance(key.default, Struct) and not isinstance(value, type(key.default)):
            raise _unread(key.name, value)
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


# --- settings of a model ----------------------------------------------------------------------------------

Source = Literal["path", "repo", "url"]
_SOURCES = ("path", "repo", "url")


def model_entry(source: Source, location: str, options: Mapping[str, Any]) -> ModelEntry:
    """Make the model from ``location`` (a path, repository or URL); an option of None is unset.

    Times are in seconds. Raises UsageInvalid with all invalid options.
    """
    keys = _keys()
    checked: dict[str, Any] = {}
    issues: list[str] = []
    for name, value in options.items():
        if name not in keys:
            issues.append(f"{name}: unknown option ({_similar(name, keys)})")
        elif value is not None:
            kind = keys[name].kind
            try:
                checked[name] = _checked(value, kind)
            except InvalidValue as invalid:
                why = f" ({invalid.why})" if invalid.why else ""
                issues.append(
                    f"{name}: invalid value {shown(repr(value))[1:-1]}{why}; expected {_allowed(kind)}"
                )
    if issues:
        raise UsageInvalid(
            f"{issues[0]}." if len(issues) == 1 else f"{len(issues)} invalid options:",
            remedy="docs/configuration.md describes each option.",
            details=tuple(issues) if len(issues) > 1 else (),
        )
    return ModelEntry(**{**checked, source: location})


@cache
def _keys() -> Mapping[str, Setting]:
    """The options by field; the model's location is not an option."""
    return {field: setting for field, setting in settings_of(ModelEntry).values() if field not in _SOURCES}


def _similar(name: str, keys: Iterable[str]) -> str:
    if f"{name}_s" in keys:
        return f"did you mean {name}_s?"
    return did_you_mean(name, keys) or f"valid options: {', '.join(keys)}"


def _checked(value: Any, kind: Any) -> Any:
    """Check one value. Raises InvalidValue."""
    match kind:
        case Many(one, or_one):
            if or_one and isinstance(value, str | PathLike):
                value = (value,)
            if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
                raise InvalidValue
            values = tuple(_checked(item, one) for item in value)
            if repeated := kind.duplicates(values):
                raise InvalidValue(f"{values[repeated[0]]!r} occurs twice")
            return values
        case FilePath(literal=literal):
            return value if value in literal else _path(value)
        case Time():
            return _seconds(value, kind)
        case Boolean():
            if not isinstance(value, bool):
                raise InvalidValue
            return value
        case Integer():
            return kind.parse(_integer(value))
        case IntegerOr():
            return kind.parse(value if isinstance(value, str) else _integer(value))
        case _:
            if not isinstance(value, str):
                raise InvalidValue
            return kind.parse(value)


def _integer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidValue
    return str(int(value))


def _seconds(value: Any, kind: Time) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidValue
    seconds = float(value)
    if not seconds >= 0 or (math.isinf(seconds) and not kind.never):
        raise InvalidValue
    return seconds


def _path(value: Any) -> str:
    if not isinstance(value, str | PathLike):
        raise InvalidValue
    path = Path(value)
    if not str(value) or "\0" in str(value):
        raise InvalidValue
    try:
        return str(path.expanduser().absolute())
    except (RuntimeError, OSError) as error:
        raise InvalidValue(str(error)) from None


def _allowed(kind: Any) -> str:
    match kind:
        case Many(one):
            return f"a list, each {_allowed(one)}"
        case Time(never=never):
            return "seconds, 0 or more" + (", or inf for never" if never else "")
        case Boolean():
            return "True or False"
        case _:
            return str(kind.allowed)
