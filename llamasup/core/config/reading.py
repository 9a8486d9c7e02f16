"""Finds the config file that applies, and reads it, with the given environment, into a Config."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.config.api_changes import Outside, Value, key_of
from llamasup.core.config.config_keys import Config, keys_of
from llamasup.core.config.consistency import inconsistencies
from llamasup.core.config.issues import (
    MAX_LISTED,
    MAX_PATTERNS,
    NOT_SHOWN,
    ConfigIssues,
    Issue,
    place_text,
    shown,
)
from llamasup.core.config.nodes import (
    MAX_BYTES,
    Entry,
    InvalidReference,
    Items,
    Node,
    Scalar,
    Table,
    expanded,
    has_reference,
    parse,
    plain_value,
    scalars_of,
)
from llamasup.core.http.address import TcpAddress, UnixAddress
from llamasup.core.llama_server.argv_builder import OWN_OPTIONS
from llamasup.core.settings.declaration import ConfigKey, Place, Setting, settings_of
from llamasup.core.settings.kinds import (
    FilePath,
    InvalidValue,
    JsonValues,
    Kind,
    Many,
    Name,
    Named,
    RuntimeName,
    ScalarKind,
    Section,
)
from llamasup.core.settings.model import ModelEntry
from llamasup.core.settings.names import is_pattern
from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import read_bounded
from llamasup.core.system.text import SEPARATORS, did_you_mean, is_path
from llamasup.errors import ConfigInvalid

_Keys = Mapping[str, tuple[str, Setting]]
VARIABLE = "LLAMASUP_CONFIG"
_INVALID: Any = object()
_QUOTED = re.compile("'([^']*)'")
_BARE_VARIABLE = re.compile(r"\$[A-Za-z_]")


def own_config(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's config: ``$XDG_CONFIG_HOME/llamasup/config.yaml``."""
    given = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(given) if Path(given).is_absolute() else Path(environ.get("HOME") or Path.home()) / ".config"
    return base / "llamasup" / "config.yaml"


def system_config() -> Path | None:
    """Return the path of the machine's config. None: a system where every user could write one (Windows)."""
    folder = native.config_folder
    return None if folder is None else Path(folder) / "llamasup" / "config.yaml"


def find_config(given: Path | None, environ: Mapping[str, str]) -> Path:
    """Return ``given`` (``--config``), else ``$LLAMASUP_CONFIG``, else the user's or the machine's config.

    A named file is returned even if it is missing: no other file may replace it. Raises ConfigInvalid if no
    file is named and none exists.
    """
    named = given or (Path(environ[VARIABLE]) if environ.get(VARIABLE) else None)
    if named is not None:
        try:
            return named.expanduser().absolute()
        except RuntimeError:  # ~name
            raise ConfigInvalid(
                f"The path of the config {str(named)!r} names an unknown user.",
                remedy="Correct the name after ~, or write the path without ~.",
            ) from None
    of_machine = system_config()
    paths = (own_config(environ), *([] if of_machine is None else [of_machine]))
    for path in paths:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # the file may exist: reading it reports the error
        return path
    raise ConfigInvalid(
        f"No config was found: {_none_of(paths)}, and ${VARIABLE} is not set.",
        remedy="Write one with `llamasup config init`, name one with --config, or serve a folder without a "
        "config: `llamasup serve --models-dir FOLDER`.",
    )


def _none_of(paths: Sequence[Path]) -> str:
    if len(paths) == 1:
        return f"{paths[0]} does not exist"
    return f"neither {' nor '.join(map(str, paths))} exists"


class Reading(Struct, frozen=True):
    """The result of reading a file. ``config`` has the default for each invalid value.

    ``written``: each value that contains an environment variable → its text in the file. ``hidden``: values
    that may be secrets, pasted in place of a path. ``outside``: what the text names outside of llamasup.
    """

    config: Config
    written: Mapping[str, str]
    hidden: Set[Place]
    outside: Outside

    def as_written(self, what: str) -> str:
        """Replace the values of environment variables in ``what``, which may be secrets, by their names.

        Values are replaced in quotes and at the start.
        """
        path, colon, rest = what.partition(": ")
        if colon and path in self.written:
            what = f"'{self.written[path]}': {rest}"
        return _QUOTED.sub(lambda found: f"'{self.written.get(found[1], found[1])}'", what)


Features = Sequence[ConfigKey[Any]]
"""The keys of features."""


def load(path: Path, environ: Mapping[str, str], features: Features, *, more_models: bool = False) -> Config:
    """Read a valid file. Raises ConfigInvalid if it cannot be read, ConfigIssues with all of its errors."""
    reading, issues = read(path, environ, features, more_models=more_models)
    if issues:
        raise ConfigIssues(str(path), issues)
    return reading.config


def read(
    path: Path, environ: Mapping[str, str], features: Features, *, more_models: bool = False
) -> tuple[Reading, tuple[Issue, ...]]:
    """Read the valid part of a file, and its errors. Raises ConfigInvalid if the file is not YAML.

    ``more_models``: other models are served as well, so the config need not name any.
    """
    try:
        content, status = read_bounded(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ConfigInvalid(
            f"The config {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}.",
            remedy="Give the path of a YAML file; `llamasup config init` writes one.",
        ) from None
    size_bytes = status.st_size
    folder = path.absolute().parent
    return read_text(
        content, str(path), folder, environ, features, size_bytes=size_bytes, more_models=more_models
    )


def read_text(
    content: bytes,
    file: str,
    folder: Path,
    environ: Mapping[str, str],
    features: Features,
    *,
    size_bytes: int = 0,
    more_models: bool = False,
) -> tuple[Reading, tuple[Issue, ...]]:
    """Read ``content`` as the text of ``file``. Relative paths start at ``folder``.

    ``size_bytes``: the size of the file, if ``content`` is only its start. Raises ConfigIssues if not YAML.
    """
    root, issues = parse(content, file, max(size_bytes, len(content)))
    keys = keys_of(features)
    reader = _Reader(file, folder, environ, issues)
    config = reader.config(root, keys)
    own = Config.__struct_fields__
    values = {**{key.name: key.default for key in features if key.name not in own}, **config.features}
    config = replace(config, features=values, lines=reader.lines)
    reading = Reading(config, reader.written, reader.hidden, Outside(reader.outside, _references(root)))
    if all(issue.key for issue in issues):
        sections = {re.split(r"[.\[]", issue.key)[0] for issue in issues}
        is_sure = "models" not in sections and sections <= keys.keys()
        models_are_known = is_sure and not more_models
        found = inconsistencies(config, features, models_are_known=models_are_known)
        issues += [replace(issue, what=reading.as_written(issue.what)) for issue in found]
    return reading, tuple(issues)


class _Reader:
    """Collects all errors; an invalid value is replaced by its default."""

    def __init__(self, file: str, folder: Path, environ: Mapping[str, str], issues: list[Issue]) -> None:
        self._file = file
        self._folder = folder
        self._environ = environ
        self._issues = issues
        self.lines: dict[Place, int] = {}
        self.written: dict[str, str] = {}
        self.hidden: set[Place] = set()
        self.outside: dict[Place, Value] = {}

    def config(self, root: Node | None, keys: _Keys) -> Config:
        match root:
            case Table():
                read = self._fields(root, (), keys)
                own = {field: read.pop(field) for field in Config.__struct_fields__ if field in read}
                return Config(**own, features=read)
            case None | Scalar(is_null=True):
                line, seen = 0, "the file is empty"
            case _:
                line, seen = root.line, _seen(root)
        remedy = "`llamasup config init` writes a config"
        self._refuse(line, (), f"{seen}; expected keys such as models_dir: ~/models ({remedy})")
        return Config()

    def _refuse(self, line: int, place: Place, what: str) -> None:
        self._issues.append(Issue(line, place_text(place), what))

    def _fields(self, node: Node, at: Place, known: _Keys) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        keys = f"with keys such as {', '.join(list(known)[:3])}"
        allowed = f"a mapping{', such as {enabled: true}' if 'enabled' in known else f' {keys}'}"
        for entry in self._entries(node, at, allowed):
            place = (*at, entry.key)
            if entry.key not in known:
                self._refuse(entry.line, place, self._unknown(entry.key, known))
                continue
            self.lines[place] = entry.line
            field, setting = known[entry.key]
            value = self._value(entry.node, place, setting.kind)
            if value is not _INVALID:
                fields[field] = value
            self._note_outside(entry.node, place, setting, value)
        return fields

    def _note_outside(self, node: Node, at: Place, setting: Setting, value: Any) -> None:
        """Note what the value names outside of llamasup. Words such as ``none`` name nothing."""
        kind, names = setting.kind, setting.outside
        if value is _INVALID or names == "nothing" or isinstance(kind, Named):
            return
        is_list = isinstance(kind, Many)
        literal = getattr(kind.kind if isinstance(kind, Many) else kind, "literal", ())
        texts = tuple(
            written.text
            for written, read in zip(
                node.items if isinstance(node, Items) else (node,),
                value if is_list else (value,),
                strict=False,  # a list may have no value
            )
            if isinstance(written, Scalar) and read and not isinstance(read, TcpAddress)
            if written.text not in literal
        )
        if texts:
            self.outside[at] = Value(names, texts, is_list, at in self.hidden)

    def _entries(self, node: Node, at: Place, allowed: str) -> Iterable[Entry]:
        if isinstance(node, Table):
            return node.entries
        if not (isinstance(node, Scalar) and node.is_null):  # null: all keys below are comments
            self._refuse(node.line, at, f"{_seen(node)}; expected {allowed}")
        return ()

    def _unknown(self, name: str, known: Iterable[str]) -> str:
        # A comparison takes a millisecond, and later errors are not listed.
        own = OWN_OPTIONS.get(f"--{name.lower()}".replace("_", "-"), "").strip("-").replace("-", "_")
        similar = f"did you mean {own}?" if own in known else ""
        if not similar and len(self._issues) < MAX_LISTED:
            similar = did_you_mean(name, known)
        return f"unknown key; {similar}" if similar else f"unknown key; valid keys: {', '.join(known)}"

    def _value(self, node: Node, at: Place, kind: Kind) -> Any:
        match kind:
            case Section(keys, short=short) if short and isinstance(node, Scalar) and not node.is_null:
                field, setting = settings_of(keys)[short]
                value = self._value(node, at, setting.kind)
                self._note_outside(node, (*at, short), setting, value)
                return _INVALID if value is _INVALID else keys(**{field: value})
            case Section(keys):
                return keys(**self._fields(node, at, settings_of(keys)))
            case Named():
                return self._named(node, at, kind)
            case Many():
                return self._many(node, at, kind)
            case JsonValues():
                return self._json_values(node, at, kind)
            case _:
                return self._scalar(node, at, kind)

    def _named(self, node: Node, at: Place, kind: Named) -> dict[str, Any]:
        values: dict[str, Any] = {}
        patterns = 0
        for entry in self._entries(node, at, "names, each with keys or values"):
            name, line = entry.key, entry.line
            try:
                Name(kind.pattern).parse(name)
            except InvalidValue as invalid:
                allowed = Name(kind.pattern).allowed
                self._refuse(line, at, f"invalid name {shown(name)}: {invalid.why}; expected {allowed}")
                continue
            patterns += is_pattern(name)
            if patterns == MAX_PATTERNS + 1:
                self._refuse(line, at, f"more than {MAX_PATTERNS} rules with * or ?; remove some")
            place = (*at, name)
            self.lines[place] = line
            value = self._value(entry.node, place, kind.of)
            if isinstance(value, ModelEntry):
                value = msgspec.structs.replace(value, where=f"{self._file}:{line}")
            if value is not _INVALID:
                values[name] = value
        return values

    def _many(self, node: Node, at: Place, kind: Many) -> Any:
        if isinstance(node, Scalar) and node.is_null:
            return ()
        if isinstance(node, Scalar) and kind.or_one:
            value = self._scalar(node, at, kind.kind)
            return _INVALID if value is _INVALID else (value,)
        if not isinstance(node, Items):
            instead = f"; write {_as_list(node.text)}" if isinstance(node, Scalar) and node.text else ""
            self._refuse(node.line, at, f"{_seen(node)}; expected {kind.allowed}{instead}")
            return _INVALID
        values = []
        for number, item in enumerate(node.items):
            place = (*at, number)
            self.lines[place] = item.line
            values.append(self._scalar(item, place, kind.kind))
        if any(value is _INVALID for value in values):
            return _INVALID
        repeated = kind.duplicates(values)
        for number in repeated:
            item = node.items[number]
            assert isinstance(item, Scalar)
            self._refuse(item.line, (*at, number), f"duplicate value {shown(item.text)}; keep one of them")
        return _INVALID if repeated else tuple(values)

    def _json_values(self, node: Node, at: Place, kind: JsonValues) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for entry in self._entries(node, at, kind.allowed):
            place = (*at, entry.key)
            self.lines[place] = entry.line
            try:
                name = kind.name.parse(entry.key)
            except InvalidValue as invalid:
                reason = invalid.why or f"expected {kind.name.allowed}"
                self._refuse(entry.line, place, f"invalid {kind.noun}: {reason}")
                continue
            try:
                value = self._json(entry.node)
                kind.check(name, value)
            except InvalidReference as error:
                self._refuse(entry.line, place, str(error))
            except InvalidValue as invalid:
                self._refuse(entry.line, place, f"{_seen(entry.node)}; {invalid.why}")
            else:
                values[name] = value
        return values

    def _json(self, node: Node) -> Any:
        match node:
            case Table(entries=entries):
                return {entry.key: self._json(entry.node) for entry in entries}
            case Items(items=items):
                return [self._json(item) for item in items]
            case _:
                text = expanded(node.text, self._environ)
                return plain_value(text) if node.plain else text

    def _scalar(self, node: Node, at: Place, kind: ScalarKind | FilePath) -> Any:
        expected = f"expected {kind.allowed}"
        if not isinstance(node, Scalar) or node.is_null:
            self._refuse(node.line, at, f"{_seen(node)}; {expected}")
            return _INVALID
        try:
            text = expanded(node.text, self._environ)
        except InvalidReference as error:
            self._refuse(node.line, at, str(error))
            return _INVALID
        hidden = kind.hidden and not (isinstance(kind, FilePath) and _looks_like_path(node.text))
        seen = f"invalid value {NOT_SHOWN}" if hidden else _seen(node)
        if hidden:
            self.hidden.add(at)
        has_variable = "${" in node.text and text != node.text
        if has_variable:
            self._note(text, node.text)
            seen += " after expansion"
        elif not isinstance(kind, FilePath) and kind.needs_plain and not node.plain:
            self._refuse(node.line, at, f"{seen}: quotes make it text; {expected}, without quotes")
            return _INVALID
        try:
            value = self._path(text, kind) if isinstance(kind, FilePath) else self._parsed(text, kind)
        except InvalidValue as invalid:
            # The reason may quote the value of a variable.
            why = f": {invalid.why}" if invalid.why and text not in self.written else ""
            self._refuse(node.line, at, f"{seen}{why}; {expected}")
            return _INVALID
        if has_variable:
            self._note_path(value, node.text)
        return value

    def _note(self, text: str, written: str) -> None:
        self.written[text] = self.written[shown(text)[1:-1]] = self.written[repr(text)[1:-1]] = written

    def _note_path(self, value: Any, written: str) -> None:
        path = value.path if isinstance(value, UnixAddress) else str(value)
        if os.path.isabs(path):  # noqa: PTH117
            self._note(path, written)
            self.written.setdefault(str(Path(path).parent), f"{written}/..")

    def _parsed(self, text: str, kind: ScalarKind) -> Any:
        value = kind.parse(text)
        if isinstance(value, UnixAddress):
            return UnixAddress(str(self._absolute(value.path)))
        if isinstance(kind, RuntimeName) and value is not None and is_path(value):
            return str(self._absolute(value))
        return value

    def _path(self, text: str, kind: FilePath) -> Path | str:
        if text in kind.literal:
            return text if kind.as_text else Path(text)
        path = self._absolute(text)
        return str(path) if kind.as_text else path

    def _absolute(self, text: str) -> Path:
        """Symlinks are not resolved: a link to a folder of models may change its target later."""
        if not text or "\0" in text:
            raise InvalidValue
        if _BARE_VARIABLE.match(text):
            raise InvalidValue("a variable needs braces, as in ${HOME}")
        home = self._environ.get("HOME")
        if home and (text == "~" or (text[:1] == "~" and text[1:2] in SEPARATORS)):
            text = home + text[1:]
        try:
            path = Path(text).expanduser()
        except RuntimeError:
            raise InvalidValue(f"unknown user {Path(text).parts[0].removeprefix('~')!r}") from None
        return Path(os.path.normpath(self._folder / path))


def _references(root: Node | None) -> Mapping[Place, Set[str]]:
    found: dict[Place, set[str]] = {}
    for place, text in () if root is None else scalars_of(root):
        if has_reference(text):
            found.setdefault(key_of(place), set()).add(text)
    return found


def _seen(node: Node) -> str:
    match node:
        case Items():
            return "found a list"
        case Table():
            return "found a mapping"
        case _:
            return "found no value" if node.is_null else f"invalid value {shown(node.text)}"


def _as_list(text: str) -> str:
    """The words of a text as a list of YAML."""
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        words = text.split()
    return f"[{', '.join(map(json.dumps, words))}]"


def _looks_like_path(text: str) -> bool:
    return is_path(text) or text.startswith(".")
