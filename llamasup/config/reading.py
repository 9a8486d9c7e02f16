"""A config file → Config. Reads the file, and the environment that it is given; nothing else."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from llamasup.config.consistency import inconsistencies
from llamasup.config.environment import Unset, expanded
from llamasup.config.kinds import Name, Refused, RuntimeName, ScalarKind
from llamasup.config.mistakes import ConfigMistakes, Mistake, shown
from llamasup.config.nodes import MOST_BYTES, Items, Node, Scalar, Table, parse
from llamasup.config.values import Config, FilePath, Key, Many, ModelEntry, Named, Section
from llamasup.core.address import UnixAddress
from llamasup.core.errors import ConfigInvalid

__all__ = ["Reading", "keys_of", "load", "read", "read_text"]

_WRONG: Any = object()


@dataclass(frozen=True, slots=True)
class Reading:
    """``lines``: where each key is, by its path (``models.qwen.path``, ``listen[1]``)."""

    config: Config
    file: str
    lines: Mapping[str, int]


def load(path: Path, environ: Mapping[str, str]) -> Config:
    """Raises ConfigInvalid: one that cannot be read, or ConfigMistakes with everything that is wrong."""
    return read(path, environ).config


def read(path: Path, environ: Mapping[str, str]) -> Reading:
    """As ``load``, and where each thing is said."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
            size_bytes = max(len(content), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise ConfigInvalid(
            f"The config {str(path)!r} cannot be read: {error.strerror or error}.",
            remedy="Give the path of a YAML file; llamasup config init makes one.",
        ) from None
    if size_bytes > MOST_BYTES:
        raise ConfigMistakes(
            str(path), (Mistake(0, "", f"it has {size_bytes} bytes; a config may have {MOST_BYTES}"),)
        )
    return read_text(content, str(path), path.absolute().parent, environ)


def read_text(content: bytes, file: str, folder: Path, environ: Mapping[str, str]) -> Reading:
    """``content`` as if it were in ``file``, whose paths begin at ``folder``. Raises ConfigMistakes."""
    root, mistakes = parse(content, file)
    reader = _Reader(file, folder, environ, mistakes)
    config = reader.whole(root)
    mistakes += inconsistencies(config, reader.lines, environ)
    if mistakes:
        raise ConfigMistakes(file, tuple(mistakes))
    return Reading(config, file, reader.lines)


def keys_of(struct: type[msgspec.Struct]) -> dict[str, tuple[str, Key]]:
    """The YAML keys of a section: the field of each, and what it takes."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        each.encode_name: (each.name, said)
        for each in msgspec.structs.fields(struct)
        for said in getattr(hints[each.name], "__metadata__", ())
        if isinstance(said, Key)
    }


class _Reader:
    """Collects what is wrong instead of stopping at it; what is wrong has its default meanwhile."""

    def __init__(self, file: str, folder: Path, environ: Mapping[str, str], mistakes: list[Mistake]) -> None:
        self._file = file
        self._folder = folder
        self._environ = environ
        self._mistakes = mistakes
        self._keys: dict[type[msgspec.Struct], dict[str, tuple[str, Key]]] = {}
        self.lines: dict[str, int] = {}

    def whole(self, root: Node | None) -> Config:
        if root is None or (isinstance(root, Scalar) and root.is_nothing):
            self._mistakes.append(
                Mistake(
                    0,
                    "",
                    "it is empty; it takes at least models_dir or models, as llamasup config init has them",
                )
            )
            return Config()
        if not isinstance(root, Table):
            what = "a list" if isinstance(root, Items) else shown(root.text)
            self._refuse(
                root.line, "", f"{what} at the top; a config has keys there, such as models_dir: ~/models"
            )
            return Config()
        return cast("Config", self._section(root, "", Config))

    def _refuse(self, line: int, key: str, what: str) -> None:
        self._mistakes.append(Mistake(line, key, what))

    def _section(self, node: Node, at: str, struct: type[msgspec.Struct]) -> msgspec.Struct:
        known = (
            self._keys.setdefault(struct, keys_of(struct)) if struct not in self._keys else self._keys[struct]
        )
        given: dict[str, Any] = {}
        for name, line, value in self._entries(node, at, f"keys such as {', '.join(list(known)[:3])}"):
            key = _joined(at, name)
            if name not in known:
                self._refuse(line, key, _unknown(name, known))
                continue
            self.lines[key] = line
            field, said = known[name]
            read = self._value(value, key, said.kind)
            if read is not _WRONG:
                given[field] = read
        return struct(**given)

    def _entries(self, node: Node, at: str, allowed: str) -> Iterable[tuple[str, int, Node]]:
        if isinstance(node, Table):
            return [(each.key, each.line, each.node) for each in node.entries]
        if not (isinstance(node, Scalar) and node.is_nothing):  # all below it is commented out
            self._refuse(node.line, at, f"{_seen(node)}; it takes {allowed}")
        return ()

    def _value(self, node: Node, key: str, kind: ScalarKind | FilePath | Many | Section | Named) -> Any:
        match kind:
            case Section(keys):
                return self._section(node, key, keys)
            case Named():
                return self._named(node, key, kind)
            case Many():
                return self._many(node, key, kind)
            case _:
                return self._scalar(node, key, kind)

    def _named(self, node: Node, key: str, kind: Named) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, line, value in self._entries(node, key, "names, and below each what is said of it"):
            path = _joined(key, name)
            try:
                Name(kind.pattern).parse(name)
            except Refused as refused:
                self._refuse(line, key, f"{shown(name)}: {refused.why}")
                continue
            self.lines[path] = line
            read = self._value(value, path, kind.of)
            if read is _WRONG:
                continue
            if isinstance(read, ModelEntry):
                read = msgspec.structs.replace(read, where=f"{self._file}:{line}")
            values[name] = read
        return values

    def _many(self, node: Node, key: str, kind: Many) -> Any:
        if isinstance(node, Scalar) and node.is_nothing:
            return ()
        if isinstance(node, Scalar) and kind.or_one:
            read = self._scalar(node, key, kind.kind)
            return _WRONG if read is _WRONG else (read,)
        if not isinstance(node, Items):
            allowed = kind.kind.what if isinstance(kind.kind, FilePath) else kind.kind.allowed
            self._refuse(node.line, key, f"{_seen(node)}; it takes a list: {allowed}")
            return _WRONG
        values = []
        for number, item in enumerate(node.items):
            path = f"{key}[{number}]"
            self.lines[path] = item.line
            values.append(self._scalar(item, path, kind.kind))
        return _WRONG if any(each is _WRONG for each in values) else tuple(values)

    def _scalar(self, node: Node, key: str, kind: ScalarKind | FilePath) -> Any:
        allowed = kind.what if isinstance(kind, FilePath) else kind.allowed
        if not isinstance(node, Scalar) or node.is_nothing:
            self._refuse(node.line, key, f"{_seen(node)}; it takes {allowed}")
            return _WRONG
        try:
            text = expanded(node.text, self._environ)
        except Unset as error:
            self._refuse(node.line, key, str(error))
            return _WRONG
        seen = (
            "a value that is not shown"
            if kind.hidden and not _looks_like_path(node.text)
            else shown(node.text)
        )
        if text != node.text and "$" in node.text:
            seen += " with its value from the environment"
        elif not isinstance(kind, FilePath) and kind.needs_plain and not node.plain:
            self._refuse(node.line, key, f"{seen} in quotes is text; it takes {allowed}, without quotes")
            return _WRONG
        try:
            return self._path(text, kind) if isinstance(kind, FilePath) else self._parsed(text, kind)
        except Refused as refused:
            why = f": {refused.why}" if refused.why and (text == node.text or "$" not in node.text) else ""
            self._refuse(node.line, key, f"{seen}{why}; it takes {allowed}")
            return _WRONG

    def _parsed(self, text: str, kind: ScalarKind) -> Any:
        value = kind.parse(text)
        if isinstance(value, UnixAddress):
            return UnixAddress(str(self._absolute(value.path)))
        if isinstance(kind, RuntimeName) and value is not None and ("/" in value or value.startswith("~")):
            return str(self._absolute(value))
        return value

    def _path(self, text: str, kind: FilePath) -> Path | str:
        if text in kind.literal:
            return text if kind.as_text else Path(text)
        if not text or "\0" in text:
            raise Refused
        path = self._absolute(text)
        return str(path) if kind.as_text else path

    def _absolute(self, text: str) -> Path:
        """Without symlinks resolved: a folder of models may be one, and be turned to another later."""
        home = self._environ.get("HOME")
        if home and (text == "~" or text.startswith("~/")):
            text = home + text[1:]
        try:
            path = Path(text).expanduser()
        except RuntimeError:
            raise Refused(f"there is no user {text.split('/')[0].removeprefix('~')!r}") from None
        return Path(os.path.normpath(self._folder / path))


def _joined(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _seen(node: Node) -> str:
    match node:
        case Items():
            return "a list"
        case Table():
            return "keys and values"
        case _:
            return "nothing" if node.is_nothing else shown(node.text)


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
    if near:
        return f"there is no such key; the nearest is {near[0]}"
    return f"there is no such key; it takes {', '.join(known)}"


def _looks_like_path(text: str) -> bool:
    return "/" in text or text.startswith((".", "~"))
