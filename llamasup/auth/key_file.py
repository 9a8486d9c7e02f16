"""The file of API keys: one a line, as llama-server's ``--api-key-file``, with attributes behind a key.

    KEY                       an inference key, and nothing else is said of it
    KEY name=alice rights=inference,control rpm=60 concurrent=2 tpm=20000 priority=high models=qwen*,tiny
    sha256:SALT:HEX name=bob  the key is not in the file, only its hash
    # comment

A line whose words behind the first have no ``=`` is a key with blanks in it: llama-server (b11434) takes
whole lines. It keeps blanks at the ends of a line too, and then no client can send the key: here they do not
count. No message says anything of a key; what looks like an attribute is shown only if it is one, or nearly.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from llamasup.auth.keys import ApiKey, KeyLimits, digest_of
from llamasup.errors import ConfigInvalid, UsageInvalid

__all__ = [
    "KeyLine",
    "checked_models",
    "checked_name",
    "key_line",
    "read_key_lines",
    "stored_form",
    "without_line",
]

_HASHED = re.compile(r"sha256:([0-9A-Za-z]{8,64}):([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MODEL = re.compile(r"[A-Za-z0-9._/:@+*?-]{1,256}")
_MAX_MODELS = 32  # all are compared with the name in each request
_UNNAMED = re.compile(r"(?:key|given)-\d+")
_ATTRIBUTE = re.compile(r"([A-Za-z_-]*)=(.*)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # but the tab, which a header may carry
_BLANKS = " \t"
_LARGEST = 1_000_000_000
# Comparing with so many takes 0.03 ms (docs/api-keys.md), for each head that is new.
_MAX_KEYS = 1000


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A line that holds a key. ``number`` counts from 1; ``hashed``: the key itself is not in it."""

    number: int
    key: ApiKey
    hashed: bool


class _Mistake(Exception):
    """What is wrong with a line, and what is allowed."""

    def __init__(self, what: str, allowed: str) -> None:
        super().__init__(what)
        self.what = what
        self.allowed = allowed


def read_key_lines(text: str, where: str, *, salt: bytes) -> tuple[KeyLine, ...]:
    """Every key of a file, in order; none is no mistake. ``salt``: for the digests of those that are plain.

    Raises ConfigInvalid, which names ``where``, the line, what was seen and what is allowed.
    """
    lines: list[KeyLine] = []
    plain: list[tuple[int, bytes]] = []
    unnamed = 0
    named: dict[str, int] = {}
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = raw.strip("\r" + _BLANKS)
        if not line or line.startswith("#"):
            continue
        try:
            name, key, hashed, word = _read_line(line, salt)
            _refuse_taken(name, named)
        except _Mistake as issue:
            raise ConfigInvalid(
                f"The API key file {where!r}, line {number}: {issue.what}.", remedy=f"{issue.allowed}."
            ) from None
        if name is None:
            unnamed += 1
            name = f"key-{unnamed}"
        named[name] = number
        lines.append(KeyLine(number, replace(key, name=name), hashed))
        if not hashed:
            plain.append((number, word.encode()))
        if len(lines) > _MAX_KEYS:
            raise ConfigInvalid(
                f"The API key file {where!r} holds more than {_MAX_KEYS} keys, in line {number}.",
                remedy=f"A file has at most {_MAX_KEYS}.",
            )
    _refuse_twice(lines, plain, where)
    return tuple(lines)


def _refuse_taken(name: str | None, named: dict[str, int]) -> None:
    if name is not None and name in named:
        raise _Mistake(
            f"name={name} is the name of line {named[name]} too", "Give each key a name of its own"
        )


def _refuse_twice(lines: list[KeyLine], plain: list[tuple[int, bytes]], where: str) -> None:
    """One key with two names would have the rights and the limits of whichever comes first."""
    seen: dict[tuple[bytes, bytes], int] = {}
    clash = None
    for line in lines:
        first = seen.setdefault((line.key.salt, line.key.digest), line.number)
        if first != line.number:
            clash = (first, line.number)
    for salt in {line.key.salt for line in lines if line.hashed}:
        for number, word in plain:
            first = seen.get((salt, digest_of(salt, word)), number)
            if first != number:
                clash = (min(first, number), max(first, number))
    if clash is not None:
        raise ConfigInvalid(
            f"The API key file {where!r}, line {clash[1]}: the key of line {clash[0]} is here again.",
            remedy="Keep one of the two lines.",
        )


# --- one line --------------------------------------------------------------------------------------


def _read_line(line: str, salt: bytes) -> tuple[str | None, ApiKey, bool, str]:
    """Its name, its key (still without one), whether it is hashed, and the key's own text."""
    if _CONTROL.search(line):
        raise _Mistake("it holds a control character", "A key is text that an HTTP header can carry")
    word, *rest = re.split(f"[{_BLANKS}]+", line)
    name = None
    attributes: dict[str, str] = {}
    if (first := _ATTRIBUTE.fullmatch(word)) and first[1] in _READERS:
        # A key was forgotten: "name=alice" must not be one, for anybody could guess it.
        raise _Mistake(f"it begins with {first[1]}=", "The key comes first, then what is said of it")
    if any(_ATTRIBUTE.fullmatch(each) for each in rest):
        attributes = _attributes(rest)
        name = attributes.pop("name", None)
    else:
        word = line
    hashed = word.startswith("sha256:")
    if hashed:
        if (match := _HASHED.fullmatch(word)) is None:
            raise _Mistake(
                "it begins with sha256: and is no hash of a key",
                "A hashed key is sha256:SALT:HEX, with 8 to 64 letters and digits, and 64 hexadecimal digits "
                "in lower case",
            )
        key = ApiKey("", match[1].encode(), bytes.fromhex(match[2]))
    else:
        key = ApiKey("", salt, digest_of(salt, word.encode()))
    for attribute, value in attributes.items():
        key = _READERS[attribute](key, value)
    return name, key, hashed, word


def _attributes(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, word in enumerate(words, 2):
        match = _ATTRIBUTE.fullmatch(word)
        if match is None:
            what = f"{word}" if word in _READERS else f"word {place}"
            raise _Mistake(f"{what} is no attribute: it has no =", _ALLOWED)
        name, value = match[1], match[2]
        if name not in _READERS:
            # Its name is shown only where it is meant as one: it may as well be a part of a key with blanks.
            near = difflib.get_close_matches(name.lower(), _READERS, n=1)
            if near:
                raise _Mistake(f"{name[:20]}= is unknown; the nearest known is {near[0]}=", _ALLOWED)
            raise _Mistake(f"word {place} is an attribute that is unknown", _ALLOWED)
        if name in found:
            raise _Mistake(f"{name}= is there twice", "Write each attribute once")
        found[name] = value
    if "name" in found:
        try:
            checked_name(found["name"])
        except UsageInvalid as error:
            raise _Mistake(error.message.removesuffix("."), error.remedy.removesuffix(".")) from None
    return found


def checked_name(name: str) -> str:
    """A key's name as it may be. Raises UsageInvalid."""
    if not _NAME.fullmatch(name):
        raise UsageInvalid(
            f"{_shown(name)} is no name of a key.",
            remedy="Use 1 to 64 letters, digits, and . _ @ - behind the first.",
        )
    if _UNNAMED.fullmatch(name):
        raise UsageInvalid(
            f"{_shown(name)} is what a key without a name is called.", remedy="Choose another name."
        )
    return name


def checked_models(names: str) -> tuple[str, ...]:
    """Names of models with commas between them, as a key may have them. Raises UsageInvalid."""
    models = tuple(names.split(","))
    bad = next((name for name in models if not _MODEL.fullmatch(name)), None)
    if bad is None and len(models) <= _MAX_MODELS:
        return models
    raise UsageInvalid(
        f"{_shown(names)} names no models." if bad is None else f"{_shown(bad)} is no name of a model.",
        remedy=f"Give up to {_MAX_MODELS} names, with commas between them: letters, digits, . _ / : @ + -, "
        "and * or ? for any others.",
    )


def _rights(key: ApiKey, value: str) -> ApiKey:
    rights = value.split(",")
    if any(right not in ("inference", "control") for right in rights) or len(set(rights)) != len(rights):
        raise _Mistake(f"rights={_shown(value)}", "rights= takes inference, control, or inference,control")
    return replace(key, infers="inference" in rights, controls="control" in rights)


def _priority(key: ApiKey, value: str) -> ApiKey:
    match value:
        case "normal" | "high":
            return replace(key, priority=value)
        case _:
            raise _Mistake(f"priority={_shown(value)}", "priority= takes normal or high")


def _models(key: ApiKey, value: str) -> ApiKey:
    try:
        return replace(key, models=checked_models(value))
    except UsageInvalid as error:
        raise _Mistake(error.message.removesuffix("."), error.remedy.removesuffix(".")) from None


def _limit(attribute: str, limit: str) -> Callable[[ApiKey, str], ApiKey]:
    def read(key: ApiKey, value: str) -> ApiKey:
        if not re.fullmatch(r"[0-9]{1,10}", value) or not 1 <= int(value) <= _LARGEST:
            raise _Mistake(
                f"{attribute}={_shown(value)}", f"{attribute}= takes a whole number from 1 to {_LARGEST}"
            )
        return replace(key, limits=replace(key.limits, **{limit: int(value)}))

    return read


_READERS: dict[str, Callable[[ApiKey, str], ApiKey]] = {
    "name": lambda key, _: key,
    "rights": _rights,
    "rpm": _limit("rpm", "requests_per_minute"),
    "concurrent": _limit("concurrent", "concurrent"),
    "tpm": _limit("tpm", "tokens_per_minute"),
    "priority": _priority,
    "models": _models,
}
_ALLOWED = f"Behind a key there may be {', '.join(f'{name}=' for name in _READERS)} without blanks around ="


def _shown(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:40] + "…")


# --- writing ---------------------------------------------------------------------------------------


def stored_form(key: str, salt: str | None) -> str:
    """``key`` as the first word of its line: hashed with ``salt``, or as it is."""
    return key if salt is None else f"sha256:{salt}:{digest_of(salt.encode(), key.encode()).hex()}"


def key_line(stored: str, key: ApiKey) -> str:
    """The line of a file that says all of ``key``; what is as without a word stays unsaid."""
    limits: KeyLimits = key.limits
    rights = [right for right, has in (("inference", key.infers), ("control", key.controls)) if has]
    said = {
        "name": key.name,
        "rights": None if rights == ["inference"] else ",".join(rights),
        "rpm": limits.requests_per_minute,
        "concurrent": limits.concurrent,
        "tpm": limits.tokens_per_minute,
        "priority": None if key.priority == "normal" else key.priority,
        "models": ",".join(key.models) or None,
    }
    return " ".join([stored, *(f"{name}={value}" for name, value in said.items() if value is not None)])


def without_line(text: str, number: int) -> str:
    """``text`` less its line ``number``; all others as they are."""
    lines = text.split("\n")
    del lines[number - 1]
    return "\n".join(lines)
