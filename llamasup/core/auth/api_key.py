"""API keys: their names, rights and limits, their file, and which key a credential matches.

Only digests of keys are stored. A fast hash is enough: generated keys have 256 random bits, and no hash makes
a short password safe. The salt hides that two files have the same key. Plain keys are hashed with a salt of
this process, so digests in its memory are useless elsewhere.

The file has one key a line, as llama-server's ``--api-key-file``, then attributes:

    KEY                       an inference key without limits
    KEY name=alice rights=inference,control rpm=60 concurrent=2 tpm=20000 priority=high models=qwen*,tiny
    sha256:SALT:HEX name=bob  the key is not in the file, only its hash
    # comment

A line whose further words have no ``=`` is a key with blanks in it, since llama-server (b11434) takes whole
lines. Blanks at the ends of a line are dropped; llama-server keeps them, and no client can send such a key.
No message shows a part of a key: a word is shown only if it is an attribute or similar to one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from llamasup.core.system.text import did_you_mean
from llamasup.errors import ConfigInvalid, UsageInvalid

Priority = Literal["normal", "high"]

# A client sends one credential, or two if a library adds its own. The bound limits the cost of a request with
# a hundred headers.
_MAX_CREDENTIALS = 4


class KeyLimits(Struct, frozen=True):
    """The limits of one key, per minute and at the same time; None: no limit."""

    requests_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_minute: int | None = None

    def __bool__(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS: Final = KeyLimits()
"""Most keys have these limits; recognized without a call."""


class ApiKey(Struct, frozen=True):
    """One API key.

    ``name`` identifies the key in logs and limits. ``priority`` is the highest that it may request.
    ``models`` are names and patterns of the models that it may use; empty: all. ``is_node``: another llamasup
    has it, which may mark its requests with ``X-Llamasup-Node``.
    """

    name: str
    salt: bytes
    digest: bytes
    infers: bool = True
    controls: bool = False
    limits: KeyLimits = NO_LIMITS
    priority: Priority = "normal"
    models: tuple[str, ...] = ()
    is_node: bool = False
    client: str = ""
    """The name of its client in records and queues: ``key:NAME``. Computed, because each request needs it."""

    def __post_init__(self) -> None:
        force_setattr(self, "client", f"key:{self.name}")

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"  # without the digest

    @property
    def rights(self) -> tuple[str, ...]:
        has = (("inference", self.infers), ("control", self.controls), ("node", self.is_node))
        return tuple(right for right, is_given in has if is_given)


def digest_of(salt: bytes, key: bytes) -> bytes:
    """Hash a key like ``printf %s "$salt$key" | sha256sum``."""
    return hashlib.sha256(salt + key).digest()


def plain_keys(keys: Iterable[str], salt: bytes) -> tuple[ApiKey, ...]:
    """Make the inference keys from options or the environment: ``given-1``, ``given-2`` and so on."""
    return tuple(
        # An environment variable may have bytes that are not UTF-8 (PEP 383).
        ApiKey(f"given-{number}", salt, digest_of(salt, key.encode("utf-8", "surrogateescape")))
        for number, key in enumerate(dict.fromkeys(keys), 1)
    )


class KeyRing:
    """Finds the key of a credential, in the same time for valid and invalid ones.

    Costs a hash for each salt (a file that llamasup wrote has one) and a comparison for each key.
    """

    __slots__ = ("_by_salt", "controls")

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Use the first of two entries for the same key."""
        by_salt: dict[bytes, list[tuple[bytes, ApiKey]]] = {}
        self.controls = False  # whether any key has the control right
        for key in keys:
            by_salt.setdefault(key.salt, []).append((key.digest, key))
            self.controls |= key.controls
        self._by_salt = tuple((salt, tuple(reversed(entries))) for salt, entries in reversed(by_salt.items()))

    def find(self, credentials: tuple[bytes, ...]) -> ApiKey | None:
        """Find the key of the first valid credential."""
        found = None
        for credential in reversed(credentials[:_MAX_CREDENTIALS]):
            if not credential:  # a file may have the hash of an unset variable
                continue
            for salt, entries in self._by_salt:
                digest = digest_of(salt, credential)
                for known, key in entries:
                    if compare_digest(digest, known):
                        found = key
        return found


# --- the file --------------------------------------------------------------------------------------

_HASHED = re.compile(r"sha256:([0-9A-Za-z]{8,64}):([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MODEL = re.compile(r"[A-Za-z0-9._/:@+*?-]{1,256}")
_RIGHTS = ("inference", "control", "node")
_MAX_MODELS = 32  # each request is compared with all of them
_UNNAMED = re.compile(r"(?:key|given)-\d+")
_ATTRIBUTE = re.compile(r"([A-Za-z_-]*)=(.*)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # except the tab, which a header may contain
_BLANKS = " \t"
_MAX_LIMIT = 1_000_000_000
# Comparing a credential with 1,000 keys takes 0.03 ms, whether one matches or not.
_MAX_KEYS = 1000


class KeyLine(Struct, frozen=True):
    """A line with a key. ``number`` counts from 1; ``hashed``: the file has only the hash of the key."""

    number: int
    key: ApiKey
    hashed: bool


def read_key_lines(text: str, where: str, *, salt: bytes) -> tuple[KeyLine, ...]:
    """Read the keys of a file, in order. It may have none. ``salt`` is for the digests of plain keys.

    Raises ConfigInvalid with the file (``where``), the line, the error and the remedy.
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
            _refuse_used(name, named)
        except UsageInvalid as invalid:
            what = invalid.message.removesuffix(".")
            raise ConfigInvalid(
                f"The API key file {where!r}, line {number}: {what}.", remedy=invalid.remedy
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
                f"The API key file {where!r} has more than {_MAX_KEYS} keys (line {number}).",
                remedy="Remove the keys that are not used.",
            )
    _refuse_duplicates(lines, plain, where)
    return tuple(lines)


def _refuse_used(name: str | None, named: dict[str, int]) -> None:
    if name is not None and name in named:
        raise UsageInvalid(
            f"name={name} is already the name of line {named[name]}", remedy="Give each key its own name"
        )


def _refuse_duplicates(lines: list[KeyLine], plain: list[tuple[int, bytes]], where: str) -> None:
    """A key with two names would have the rights and limits of the first one only."""
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
            f"The API key file {where!r}, line {clash[1]}: the same key as in line {clash[0]}.",
            remedy="Keep one of the two lines.",
        )


# --- one line --------------------------------------------------------------------------------------


def _read_line(line: str, salt: bytes) -> tuple[str | None, ApiKey, bool, str]:
    """The name, the key (without its name), whether it is hashed, and the text of the key."""
    if _CONTROL.search(line):
        raise UsageInvalid(
            "it contains a control character", remedy="A key is text that fits in an HTTP header"
        )
    word, *rest = re.split(f"[{_BLANKS}]+", line)
    name = None
    attributes: dict[str, str] = {}
    if (first := _ATTRIBUTE.fullmatch(word)) and first[1] in _READERS:
        # The key is missing: "name=alice" must not become a key, which is easy to guess.
        raise UsageInvalid(f"it begins with {first[1]}=", remedy="The key comes first, then its attributes")
    if any(_ATTRIBUTE.fullmatch(part) for part in rest):
        attributes = _attributes(rest)
        name = attributes.pop("name", None)
    else:
        word = line
    hashed = word.startswith("sha256:")
    if hashed:
        if (match := _HASHED.fullmatch(word)) is None:
            raise UsageInvalid(
                "it begins with sha256: but is not a valid hash",
                remedy="A hashed key is sha256:SALT:HEX: 8 to 64 letters and digits, then 64 hexadecimal "
                "digits in lower case",
            )
        key = ApiKey("", match[1].encode(), bytes.fromhex(match[2]))
    else:
        key = ApiKey("", salt, digest_of(salt, word.encode()))
    for attribute, value in attributes.items():
        key = _READERS[attribute](key, value)
    return name, key, hashed, word


def _attributes(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, word in enumerate(words, 2):
        match = _ATTRIBUTE.fullmatch(word)
        if match is None:
            what = f"{word} is not followed by =" if word in _READERS else f"word {number} has no ="
            raise UsageInvalid(what, remedy=_ALLOWED)
        name, value = match[1], match[2]
        if name not in _READERS:
            # The word is shown only if it resembles an attribute: it may be a part of a key with blanks.
            if similar := did_you_mean(name.lower(), _READERS):
                raise UsageInvalid(f"unknown attribute {name[:20]}= ({similar})", remedy=_ALLOWED)
            raise UsageInvalid(f"word {number} is an unknown attribute", remedy=_ALLOWED)
        if name in found:
            raise UsageInvalid(f"{name}= occurs twice", remedy="Write each attribute once")
        found[name] = value
    if "name" in found:
        checked_name(found["name"])
    return found


def checked_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a key. Raises UsageInvalid."""
    if not _NAME.fullmatch(name):
        raise UsageInvalid(
            f"{_shown(name)} is not a valid key name.",
            remedy="Use 1 to 64 letters, digits and . _ @ -, with a letter or a digit at the start.",
        )
    if _UNNAMED.fullmatch(name):
        raise UsageInvalid(
            f"{_shown(name)} is reserved for keys without a name.", remedy="Choose another name."
        )
    return name


def checked_models(names: str) -> tuple[str, ...]:
    """Read a comma-separated list of names and patterns of models. Raises UsageInvalid."""
    models = tuple(names.split(","))
    invalid = next((name for name in models if not _MODEL.fullmatch(name)), None)
    if invalid is None and len(models) <= _MAX_MODELS:
        return models
    raise UsageInvalid(
        f"{_shown(names)} has {len(models)} model names."
        if invalid is None
        else f"{_shown(invalid)} is not a valid model name.",
        remedy=f"Give up to {_MAX_MODELS} names, separated by commas: letters, digits, . _ / : @ + -, and "
        "* or ? as wildcards.",
    )


def with_rights(key: ApiKey, names: str) -> ApiKey:
    """Give the key a comma-separated list of rights. Raises UsageInvalid."""
    rights = names.split(",")
    is_node, infers = "node" in rights, "inference" in rights
    if not {*rights} <= {*_RIGHTS} or len({*rights}) != len(rights) or (is_node and not infers):
        raise UsageInvalid(
            f"invalid rights={_shown(names)}.",
            remedy="rights= takes inference, control, or inference,control; node needs inference.",
        )
    return replace(key, infers=infers, controls="control" in rights, is_node=is_node)


def _priority(key: ApiKey, value: str) -> ApiKey:
    match value:
        case "normal" | "high":
            return replace(key, priority=value)
        case _:
            raise UsageInvalid(f"invalid priority={_shown(value)}", remedy="priority= takes normal or high")


def _limit(attribute: str, limit: str) -> Callable[[ApiKey, str], ApiKey]:
    def read(key: ApiKey, value: str) -> ApiKey:
        if not re.fullmatch(r"[0-9]{1,10}", value) or not 1 <= int(value) <= _MAX_LIMIT:
            raise UsageInvalid(
                f"invalid {attribute}={_shown(value)}",
                remedy=f"{attribute}= takes a whole number from 1 to {_MAX_LIMIT}",
            )
        return replace(key, limits=replace(key.limits, **{limit: int(value)}))

    return read


_READERS: dict[str, Callable[[ApiKey, str], ApiKey]] = {
    "name": lambda key, _: key,
    "rights": with_rights,
    "rpm": _limit("rpm", "requests_per_minute"),
    "concurrent": _limit("concurrent", "concurrent"),
    "tpm": _limit("tpm", "tokens_per_minute"),
    "priority": _priority,
    "models": lambda key, value: replace(key, models=checked_models(value)),
}
_ALLOWED = f"A key may be followed by {', '.join(f'{name}=' for name in _READERS)}, without blanks around ="


def _shown(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:40] + "…")


# --- writing ---------------------------------------------------------------------------------------


def stored_form(key: str, salt: str | None) -> str:
    """Write the first word of the line: ``key`` hashed with ``salt``, or plain."""
    return key if salt is None else f"sha256:{salt}:{digest_of(salt.encode(), key.encode()).hex()}"


def key_line(stored: str, key: ApiKey) -> str:
    """Write the line of ``key``, without attributes that have their default."""
    limits: KeyLimits = key.limits
    attributes = {
        "name": key.name,
        "rights": None if key.rights == ("inference",) else ",".join(key.rights),
        "rpm": limits.requests_per_minute,
        "concurrent": limits.concurrent,
        "tpm": limits.tokens_per_minute,
        "priority": None if key.priority == "normal" else key.priority,
        "models": ",".join(key.models) or None,
    }
    return " ".join([stored, *(f"{name}={value}" for name, value in attributes.items() if value is not None)])


def without_line(text: str, number: int) -> str:
    """Remove line ``number`` from ``text``; the other lines are unchanged."""
    lines = text.split("\n")
    del lines[number - 1]
    return "\n".join(lines)
