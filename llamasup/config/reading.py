"""A config file → Config. Reads the file, and the environment that it is given; nothing else."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from llamasup.config.consistency import inconsistencies
from llamasup.config.issues import (
    MAX_PATTERNS,
    MAX_TOLD,
    NOT_SHOWN,
    ConfigIssues,
    Issue,
    Place,
    place_text,
    shown,
)
from llamasup.config.keys import FilePath, Key, Kind, Many, Named, Section
from llamasup.config.kinds import InvalidValue, Name, RuntimeName, ScalarKind
from llamasup.config.nodes import MAX_BYTES, Items, Node, Scalar, Table, parse
from llamasup.config.sources import Unset, expanded
from llamasup.config.values import Config, ModelEntry
from llamasup.errors import ConfigInvalid
from llamasup.http.address import UnixAddress
from llamasup.models.names import is_pattern
from llamasup.system.storage.folders import read_bounded

__all__ = ["Reading", "keys_of", "load", "read", "read_text"]

_WRONG: Any = object()
_QUOTED = re.compile("'([^']*)'")
_BARE_VARIABLE = re.compile(r"\$[A-Za-z_]")


@dataclass(frozen=True, slots=True)
class Reading:
    """What is wrong has its default in ``config``.

    ``written``: what stands in the file for each value that is partly the environment's; ``hidden`` are those
    that may be secrets, pasted where the path of one belongs.
    """

    config: Config
    written: Mapping[str, str]
    hidden: Set[Place]

    def as_written(self, what: str) -> str:
        """``what`` with the names of variables where it quotes what they hold, or begins with a file of
        theirs: that may be a secret.
        """
        path, colon, rest = what.partition(": ")
        if colon and path in self.written:
            what = f"'{self.written[path]}': {rest}"
        return _QUOTED.sub(lambda found: f"'{self.written.get(found[1], found[1])}'", what)


def load(path: Path, environ: Mapping[str, str], *, more_models: bool = False) -> Config:
    """Raises ConfigInvalid: one that cannot be read, or ConfigIssues with everything that is wrong."""
    reading, issues = read(path, environ, more_models=more_models)
    if issues:
        raise ConfigIssues(str(path), issues)
    return reading.config


def read(
    path: Path, environ: Mapping[str, str], *, more_models: bool = False
) -> tuple[Reading, tuple[Issue, ...]]:
    """What could be read of a file, and what is wrong with it. ``more_models``: there are some besides, so it
    need not say what is served. Raises ConfigInvalid where it is no YAML.
    """
    try:
        content, status = read_bounded(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ConfigInvalid(
            f"The config {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}.",
            remedy="Give the path of a YAML file; llamasup config init makes one.",
        ) from None
    return read_text(
        content,
        str(path),
        path.absolute().parent,
        environ,
        size_bytes=status.st_size,
        more_models=more_models,
    )


def read_text(
    content: bytes,
    file: str,
    folder: Path,
    environ: Mapping[str, str],
    *,
    size_bytes: int = 0,
    more_models: bool = False,
) -> tuple[Reading, tuple[Issue, ...]]:
    """``content`` as if it were in ``file``, whose paths begin at ``folder``.

    ``size_bytes``: of all of it, where that is more than ``content``. Raises ConfigIssues for no YAML.
    """
    root, issues = parse(content, file, max(size_bytes, len(content)))
    reader = _Reader(file, folder, environ, issues)
    config = msgspec.structs.replace(reader.whole(root), lines=reader.lines)
    reading = Reading(config, reader.written, reader.hidden)
    if all(each.key for each in issues):
        sections = {re.split(r"[.\[]", each.key)[0] for each in issues}
        is_sure = "models" not in sections and sections <= keys_of(Config).keys()
        models_are_known = is_sure and not more_models
        found = inconsistencies(config, models_are_known=models_are_known)
        issues += [replace(each, what=reading.as_written(each.what)) for each in found]
    return reading, tuple(issues)


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

    def __init__(self, file: str, folder: Path, environ: Mapping[str, str], issues: list[Issue]) -> None:
        self._file = file
        self._folder = folder
        self._environ = environ
        self._mistakes = issues
        self._keys: dict[type[msgspec.Struct], dict[str, tuple[str, Key]]] = {}
        self.lines: dict[Place, int] = {}
        self.written: dict[str, str] = {}
        self.hidden: set[Place] = set()

    def whole(self, root: Node | None) -> Config:
        match root:
            case Table():
                return cast("Config", self._section(root, (), Config))
            case None | Scalar(is_nothing=True):
                line, what = 0, "it is empty; a config says at least what is served"
            case Items(line):
                what = "a list; a config has keys"
            case Scalar(line, text):
                what = f"{shown(text)}; a config has keys"
        self._refuse(line, (), f"{what}, as in models_dir: ~/models (llamasup config init writes one)")
        return Config()

    def _refuse(self, line: int, place: Place, what: str) -> None:
        self._mistakes.append(Issue(line, place_text(place), what))

    def _section(self, node: Node, at: Place, struct: type[msgspec.Struct]) -> msgspec.Struct:
        if struct not in self._keys:
            self._keys[struct] = keys_of(struct)
        known = self._keys[struct]
        given: dict[str, Any] = {}
        for name, line, value in self._entries(node, at, f"keys such as {', '.join(list(known)[:3])}"):
            place = (*at, name)
            if name not in known:
                self._refuse(line, place, self._unknown(name, known))
                continue
            self.lines[place] = line
            field, said = known[name]
            read = self._value(value, place, said.kind)
            if read is not _WRONG:
                given[field] = read
        return struct(**given)

    def _entries(self, node: Node, at: Place, allowed: str) -> Iterable[tuple[str, int, Node]]:
        if isinstance(node, Table):
            return [(each.key, each.line, each.node) for each in node.entries]
        if not (isinstance(node, Scalar) and node.is_nothing):  # all below it is commented out
            self._refuse(node.line, at, f"{_seen(node)}; it takes {allowed}")
        return ()

    def _unknown(self, name: str, known: Iterable[str]) -> str:
        if len(self._mistakes) < MAX_TOLD:  # a comparison takes a millisecond, and nobody sees later ones
            near = difflib.get_close_matches(name[:64], known, n=1)
            if near:
                return f"there is no such key; the nearest is {near[0]}"
        return f"there is no such key; it takes {', '.join(known)}"

    def _value(self, node: Node, at: Place, kind: Kind) -> Any:
        match kind:
            case Section(keys):
                return self._section(node, at, keys)
            case Named():
                return self._named(node, at, kind)
            case Many():
                return self._many(node, at, kind)
            case _:
                return self._scalar(node, at, kind)

    def _named(self, node: Node, at: Place, kind: Named) -> dict[str, Any]:
        values: dict[str, Any] = {}
        patterns = 0
        for name, line, value in self._entries(node, at, "names, and below each what is said of it"):
            place = (*at, name)
            try:
                Name(kind.pattern).parse(name)
            except InvalidValue as refused:
                allowed = Name(kind.pattern).allowed
                self._refuse(line, at, f"{shown(name)}: {refused.why}; it takes {allowed}")
                continue
            patterns += is_pattern(name)
            if patterns == MAX_PATTERNS + 1:
                self._refuse(line, at, f"more than {MAX_PATTERNS} rules with * or ?")
            self.lines[place] = line
            read = self._value(value, place, kind.of)
            if read is not _WRONG:
                where = f"{self._file}:{line}"
                values[name] = (
                    msgspec.structs.replace(read, where=where) if isinstance(read, ModelEntry) else read
                )
        return values

    def _many(self, node: Node, at: Place, kind: Many) -> Any:
        if isinstance(node, Scalar) and node.is_nothing:
            return ()
        if isinstance(node, Scalar) and kind.or_one:
            read = self._scalar(node, at, kind.kind)
            return _WRONG if read is _WRONG else (read,)
        if not isinstance(node, Items):
            self._refuse(node.line, at, f"{_seen(node)}; it takes a list, each {_allowed(kind.kind)}")
            return _WRONG
        values = []
        for number, item in enumerate(node.items):
            place = (*at, number)
            self.lines[place] = item.line
            values.append(self._scalar(item, place, kind.kind))
        return _WRONG if any(each is _WRONG for each in values) else tuple(values)

    def _scalar(self, node: Node, at: Place, kind: ScalarKind | FilePath) -> Any:
        takes = f"it takes {_allowed(kind)}"
        if not isinstance(node, Scalar) or node.is_nothing:
            self._refuse(node.line, at, f"{_seen(node)}; {takes}")
            return _WRONG
        try:
            text = expanded(node.text, self._environ)
        except Unset as error:
            self._refuse(node.line, at, str(error))
            return _WRONG
        hidden = kind.hidden and not (isinstance(kind, FilePath) and _looks_like_path(node.text))
        seen = NOT_SHOWN if hidden else shown(node.text)
        if hidden:
            self.hidden.add(at)
        is_environments = "${" in node.text and text != node.text
        if is_environments:
            self._note(text, node.text)
            seen += " with its value from the environment"
        elif not isinstance(kind, FilePath) and kind.needs_plain and not node.plain:
            self._refuse(node.line, at, f"{seen} in quotes is text; {takes}, without quotes")
            return _WRONG
        try:
            value = self._path(text, kind) if isinstance(kind, FilePath) else self._parsed(text, kind)
        except InvalidValue as refused:
            tells = refused.why and text not in self.written
            self._refuse(node.line, at, f"{seen}{f': {refused.why}' if tells else ''}; {takes}")
            return _WRONG
        if is_environments:
            self._note_path(value, node.text)
        return value

    def _note(self, text: str, written: str) -> None:
        self.written[text] = self.written[shown(text)[1:-1]] = self.written[repr(text)[1:-1]] = written

    def _note_path(self, value: Any, written: str) -> None:
        path = value.path if isinstance(value, UnixAddress) else str(value)
        if path.startswith("/"):
            self._note(path, written)
            self.written.setdefault(str(Path(path).parent), f"{written}/..")

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
        path = self._absolute(text)
        return str(path) if kind.as_text else path

    def _absolute(self, text: str) -> Path:
        """Without symlinks resolved: a folder of models may be one, and be turned to another later."""
        if not text or "\0" in text:
            raise InvalidValue
        if _BARE_VARIABLE.match(text):
            raise InvalidValue("a variable is written in braces, as in ${HOME}")
        home = self._environ.get("HOME")
        if home and (text == "~" or text.startswith("~/")):
            text = home + text[1:]
        try:
            path = Path(text).expanduser()
        except RuntimeError:
            raise InvalidValue(f"there is no user {text.split('/')[0].removeprefix('~')!r}") from None
        return Path(os.path.normpath(self._folder / path))


def _allowed(kind: ScalarKind | FilePath) -> str:
    return kind.what if isinstance(kind, FilePath) else kind.allowed


def _seen(node: Node) -> str:
    match node:
        case Items():
            return "a list"
        case Table():
            return "keys and values"
        case _:
            return "nothing" if node.is_nothing else shown(node.text)


def _looks_like_path(text: str) -> bool:
    return "/" in text or text.startswith((".", "~"))
