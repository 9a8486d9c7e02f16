"""The kinds of values of settings: parsing, and description in words and in JSON Schema.

A kind gets the raw text. The setting decides the type, not the look of the value, so YAML's own guesses
(``no``, ``080``, ``1:30``, ``2026-01-01``) do not apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from llamasup.core.settings.names import MAX_LETTERS, NAME, is_pattern, why_not_a_name, why_not_an_alias
from llamasup.core.settings.units import DURATION, PERCENT, SIZE, Size, read_duration, read_size
from llamasup.errors import UsageInvalid

if TYPE_CHECKING:
    from llamasup.core.http.address import Address

Names = Literal["", "nothing", "program", "path", "host", "flags", "rights"]
"""A value names this outside of llamasup: a program that is started, a path that is read or written, a host
that gets secrets or is in the private network, or flags of llama-server. ``rights``: who may do what. Empty:
a kind that holds anything, so the setting decides.
"""

_PATTERN = r"[A-Za-z0-9._/:@+*?-]+"
_WHOLE = r"-?(?:0|[1-9][0-9]*)"
_MAX_DIGITS = 18  # fits 64 bits, and int() of a million digits takes minutes
_HOST_PORT = r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*):(?P<port>[0-9]{1,5})"
_REPO = r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*(?::[A-Za-z0-9._-]+)?"


class InvalidValue(Exception):
    """The text is not of this kind. ``why``: the reason, if there is more to say."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


class ScalarKind(msgspec.Struct, frozen=True):
    """``allowed`` describes valid values. ``needs_plain``: a quoted value is text, and refused. ``hidden``:
    errors do not show the value.
    """

    needs_plain: ClassVar[bool] = False
    hidden: ClassVar[bool] = False

    @property
    def allowed(self) -> str:
        raise NotImplementedError

    @property
    def names(self) -> Names:
        return "nothing"

    def parse(self, text: str) -> Any:
        """Parse a raw text. Raises InvalidValue."""
        raise NotImplementedError

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "minLength": 1}


class Text(ScalarKind, frozen=True):
    allowed: str = "text"
    pattern: str = ""

    @property
    def names(self) -> Names:
        return "nothing" if self.pattern else ""

    def parse(self, text: str) -> str:
        if not text or "\0" in text or (self.pattern and not re.fullmatch(self.pattern, text)):
            raise InvalidValue
        return text

    def schema(self) -> Mapping[str, Any]:
        if self.pattern:
            return {"type": "string", "pattern": f"^{self.pattern}$"}
        return {"type": ["string", "number", "boolean"]}  # a flag's value: 42 need not be in quotes


class Boolean(ScalarKind, frozen=True):
    allowed: ClassVar[str] = "true or false"
    needs_plain: ClassVar[bool] = True

    def parse(self, text: str) -> bool:
        if text not in ("true", "True", "TRUE", "false", "False", "FALSE"):
            raise InvalidValue
        return text.lower() == "true"

    def schema(self) -> Mapping[str, Any]:
        return {"type": "boolean"}


class Integer(ScalarKind, frozen=True):
    minimum: int = 0
    maximum: int = 1 << 31  # llama-server's own numbers have 32 bits
    needs_plain: ClassVar[bool] = True

    @property
    def allowed(self) -> str:
        if self.maximum == 1 << 31:
            return f"a whole number, {self.minimum} or more"
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> int:
        if not re.fullmatch(_WHOLE, text):
            if text.isascii() and text.isdigit():
                raise InvalidValue("YAML reads a number with a leading 0 as octal")
            raise InvalidValue
        if len(text) > _MAX_DIGITS or not self.minimum <= int(text) <= self.maximum:
            raise InvalidValue
        return int(text)

    def schema(self) -> Mapping[str, Any]:
        return {"type": "integer", "minimum": self.minimum} | (
            {} if self.maximum == 1 << 31 else {"maximum": self.maximum}
        )


class OneOf(ScalarKind, frozen=True):
    choices: tuple[str, ...]

    @property
    def allowed(self) -> str:
        *others, last = self.choices
        return f"{', '.join(others)} or {last}" if others else last

    def parse(self, text: str) -> str:
        if text not in self.choices:
            raise InvalidValue
        return text

    def schema(self) -> Mapping[str, Any]:
        # Editors that still read YAML 1.1 parse on and off as booleans.
        booleans = [value for name, value in (("on", True), ("off", False)) if name in self.choices]
        return {"enum": [*self.choices, *booleans]}


class IntegerOr(ScalarKind, frozen=True):
    minimum: int
    choices: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"{Integer(self.minimum).allowed}, or {' or '.join(self.choices)}"

    def parse(self, text: str) -> int | str:
        return text if text in self.choices else Integer(self.minimum).parse(text)

    def schema(self) -> Mapping[str, Any]:
        return {"anyOf": [Integer(self.minimum).schema(), {"enum": list(self.choices)}]}


class Time(ScalarKind, frozen=True):
    """Seconds. ``never``: the word is allowed, for infinity; ``zero_is_none``: 0 means no limit."""

    never: bool = False
    zero_is_none: bool = False

    @property
    def allowed(self) -> str:
        never = ", or never" if self.never else ""
        return f"a time such as 90s, 10m or 1h30m{never}{', or 0 for no limit' if self.zero_is_none else ''}"

    def parse(self, text: str) -> float | None:
        if self.never and text == "never":
            return float("inf")
        seconds = read_duration(text)
        if seconds is None:
            raise InvalidValue
        return None if self.zero_is_none and not seconds else seconds

    def schema(self) -> Mapping[str, Any]:
        pattern = f"^(?:{DURATION}{'|never' if self.never else ''})$"
        return {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": pattern}]}


class SizeText(ScalarKind, frozen=True):
    percent: bool = True

    @property
    def allowed(self) -> str:
        return f"a size such as 12GiB or 800MB{', or a share from 1% to 100%' if self.percent else ''}"

    def parse(self, text: str) -> Size:
        size, why = read_size(text)
        if size is None or (size.percent is not None and not self.percent):
            raise InvalidValue(why)
        return size

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": f"^(?:{SIZE}{f'|{PERCENT}' if self.percent else ''})$"}


# --- names -------------------------------------------------------------------------------------------


class Alias(ScalarKind, frozen=True):
    allowed: ClassVar[str] = "a name of printable characters without * and ?"

    def parse(self, text: str) -> str:
        if why := why_not_an_alias(text):
            raise InvalidValue(f"it {why.partition(';')[0]}")
        return text

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": r"^(?! )[^\x00-\x1f\x7f*?]+(?<! )$", "maxLength": MAX_LETTERS}


class Name(ScalarKind, frozen=True):
    """A model's name; ``pattern``: wildcards are allowed."""

    pattern: bool = False

    @property
    def allowed(self) -> str:
        wildcards = " (* and ? match other characters)" if self.pattern else ""
        return f"a name of letters, digits and . _ / : @ + -{wildcards}"

    def parse(self, text: str) -> str:
        why = why_not_a_name(text.replace("*", "x").replace("?", "x") if self.pattern else text)
        if why:
            reason = why.partition(";")[0]  # the rest describes valid names, as ``allowed`` does
            raise InvalidValue("* and ? are allowed only in patterns" if is_pattern(text) else f"it {reason}")
        return text

    def schema(self) -> Mapping[str, Any]:
        letters = _PATTERN if self.pattern else NAME
        return {"type": "string", "pattern": rf"^(?!/)(?!.*\.\.){letters}$", "maxLength": MAX_LETTERS}


class Repo(ScalarKind, frozen=True):
    allowed: ClassVar[str] = "org/repo or org/repo:quant"

    def parse(self, text: str) -> str:
        if not re.fullmatch(_REPO, text) or ".." in text:
            raise InvalidValue
        return text

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": f"^{_REPO}$"}


class Url(ScalarKind, frozen=True):
    """``http`` is accepted here; ``consistency`` refuses it unless another key allows it."""

    allowed: str = "an https URL of a .gguf file"
    pattern: str = r"https?://[^\s/?#@]+(?:/\S*)?"
    hidden: ClassVar[bool] = True  # a URL may hold a password, or a token in its query

    def parse(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise InvalidValue
        return text

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": f"^{self.pattern}$"}


class Endpoint(Url, frozen=True):
    allowed: str = "the URL of a mirror, such as https://hub.example.net"
    pattern: str = r"https?://[^\s/?#@]+(?:/[^\s?#]*)?"
    names: ClassVar[Names] = "host"

    def parse(self, text: str) -> str:
        return Url.parse(self, text).rstrip("/")


class RuntimeName(ScalarKind, frozen=True):
    """None for ``auto``. The reader makes a path absolute."""

    allowed: ClassVar[str] = "auto, embedded, or the path or name of a llama-server"
    names: ClassVar[Names] = "program"

    def parse(self, text: str) -> str | None:
        if not text or "\0" in text:
            raise InvalidValue
        return None if text == "auto" else text


# --- addresses: their rules are those of ``http.address``, imported when a value is parsed ---------------


class Listen(ScalarKind, frozen=True):
    """An address to listen on. The reader makes the path of a socket absolute."""

    allowed: ClassVar[str] = "HOST:PORT such as 127.0.0.1:8080 or [::1]:8080, or a path that ends in .sock"
    names: ClassVar[Names] = "path"

    def parse(self, text: str) -> Address:
        from llamasup.core.http.address import TcpAddress, UnixAddress

        if text.endswith(".sock"):
            return UnixAddress(text)
        parts = re.fullmatch(_HOST_PORT, text)
        if parts is None:
            raise InvalidValue(_why_not_an_address(text))
        host, port = parts["host"], int(parts["port"])
        if not host:
            raise InvalidValue("the host is missing; use 0.0.0.0 or [::] for all addresses of this machine")
        host = host.removeprefix("[").removesuffix("]")
        if not host or any(letter.isspace() for letter in host) or "/" in host or "," in host:
            raise InvalidValue
        if port > 65535:
            raise InvalidValue("the port is above 65535")
        return TcpAddress(host, port)

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": r"^(?:.+\.sock|(?:\[[^\[\]]+\]|[^:\[\]/\s,]+):[0-9]{1,5})$"}


def _why_not_an_address(text: str) -> str:
    from llamasup.core.http.address import invalid_host_remedy

    if text.count(":") > 1 and "[" not in text and "/" not in text:
        return "an IPv6 address needs brackets"
    bare = text.removeprefix("[").removesuffix("]")
    return "" if not bare or bare.isdigit() or invalid_host_remedy(bare) else "the port is missing"


class HostName(ScalarKind, frozen=True):
    allowed: ClassVar[str] = "a host name without a port, such as llm.example.net"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import allowed_host

        return _checked(allowed_host, text)


class Origin(ScalarKind, frozen=True):
    allowed: ClassVar[str] = "an origin such as https://chat.example.net"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import allowed_origin

        return _checked(allowed_origin, text)

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": "^[a-zA-Z][a-zA-Z0-9+.-]*://[^/*]+$"}


class MediaHost(ScalarKind, frozen=True):
    """A host of media. ``true`` is every host; ``false`` is none, as an empty string that is dropped."""

    allowed: ClassVar[str] = "false, true for any host, or a host such as cdn.example.net or 10.0.0.5:8000"
    names: ClassVar[Names] = "host"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import ANY_HOST, allowed_media_host

        if text.lower() in ("true", "false"):
            return ANY_HOST if text.lower() == "true" else ""
        return _checked(allowed_media_host, text)

    def schema(self) -> Mapping[str, Any]:
        return {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 1}]}


class ProxyAddress(ScalarKind, frozen=True):
    allowed: ClassVar[str] = "an address or a network such as 10.0.0.0/8, or unix for Unix sockets"
    names: ClassVar[Names] = "host"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import UNIX, proxy_network

        try:
            return text if text == UNIX else str(proxy_network(text))
        except ValueError as error:
            raise InvalidValue(str(error)) from None


class RpcWorker(ScalarKind, frozen=True):
    """The address of an RPC worker, as text. ``http.address`` checks that it is private."""

    allowed: ClassVar[str] = (
        "HOST:PORT of a loopback or private address such as 10.0.0.2:50052, or tls://HOST:PORT"
    )
    names: ClassVar[Names] = "host"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import parse_worker

        try:
            return str(parse_worker(text))
        except UsageInvalid as error:
            raise InvalidValue(error.message.rstrip(".")) from None

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": r"^(?:tls://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$"}


def _checked(check: Callable[[str], str], text: str) -> str:
    try:
        return check(text)
    except UsageInvalid as error:
        raise InvalidValue(f"it {error.message.removeprefix(f'{text!r} ').rstrip('.')}") from None


# --- paths, lists and sections ------------------------------------------------------------------------


class FilePath(msgspec.Struct, frozen=True):
    """A path, absolute once it is read; relative paths start at the config's folder.

    ``literal``: words that are not paths. ``hidden``: errors do not show the value, which may be a key pasted
    here instead of the path of its file.
    """

    allowed: str = "a path"
    literal: tuple[str, ...] = ()
    hidden: bool = False
    as_text: bool = False
    names: ClassVar[Names] = "path"


class Many(msgspec.Struct, frozen=True):
    """A list of one kind. ``or_one``: a single value is a list of one.

    ``identity``: values for which it returns the same are duplicates, which are an error. None: duplicates
    are allowed.
    """

    kind: ScalarKind | FilePath
    or_one: bool = True
    identity: Callable[[Any], object] | None = None

    def duplicates(self, values: Sequence[Any]) -> list[int]:
        """List the positions of the values that repeat an earlier one."""
        if self.identity is None:
            return []
        first: dict[object, int] = {}
        return [
            number
            for number, value in enumerate(values)
            if first.setdefault(self.identity(value), number) != number
        ]

    @property
    def allowed(self) -> str:
        return f"a list, each {self.kind.allowed}"

    @property
    def names(self) -> Names:
        return self.kind.names


class Section(msgspec.Struct, frozen=True):
    """A mapping with the keys of a Struct. ``name``: in the JSON Schema, if it is not that of the Struct.
    ``short``: a single value is the value of this key.
    """

    keys: type[msgspec.Struct]
    name: str = ""
    short: str = ""
    names: ClassVar[Names] = "nothing"


class Named(msgspec.Struct, frozen=True):
    """A mapping with names that the file chooses. ``pattern``: the names may have wildcards."""

    of: Section | Many
    pattern: bool = False

    @property
    def names(self) -> Names:
        return self.of.names


class JsonValues(msgspec.Struct, frozen=True):
    """A mapping of names to values as in JSON. ``noun``: what one of them is, for errors.

    ``check`` raises InvalidValue for a value that its name cannot have.
    """

    noun: str
    allowed: str
    name: ScalarKind
    check: Callable[[str, Any], None]
    names: ClassVar[Names] = "nothing"


Kind = ScalarKind | FilePath | Many | Section | Named | JsonValues
