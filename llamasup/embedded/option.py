"""One row of the option table, and its text in ``--help``.

The layout is that of llama.cpp's ``common_arg::to_string`` (b11434), which programs parse: head up to column
40, text wrapped at 70, ``(env: NAME)`` last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

_COLUMN = 40
_WIDTH = 70

ON = "on"
OFF = "off"
"""The value of a switch without a value: ON for its own spelling, OFF for a negation."""

Question = Literal["help", "version", "devices"]


class InvalidValue(ValueError):
    """An invalid value of an option. The text completes ``error while handling argument "X": …``."""


class Setter(Struct, frozen=True):
    """Sets a value on xllamacpp's ``CommonParams``.

    ``needs`` are the (dotted) attributes without which the option is not supported, as wheels differ.
    ``apply`` takes the params and the text of the value; it raises InvalidValue.
    """

    needs: tuple[str, ...]
    apply: Callable[[Any, str], None]

    def is_possible(self, params: object) -> bool:
        return all(_has(params, path) for path in self.needs)


class Option(Struct, frozen=True):
    """One option of llama-server.

    ``names`` contains the spellings in the order of the help, after a ``|`` those that switch the option off.
    ``argument`` is the placeholder, empty for a switch. An option without a setter asks a question, or is a
    removed one: then ``text`` is the error.
    """

    names: str
    argument: str
    env: str
    setter: Setter | None
    text: str
    asks: Question | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(self.names.replace("|", " ").split())

    @property
    def negations(self) -> tuple[str, ...]:
        return tuple(self.names.partition("|")[2].split())

    @property
    def is_removed(self) -> bool:
        return self.setter is None and self.asks is None

    def is_possible(self, params: object) -> bool:
        return self.setter is None or self.setter.is_possible(params)

    def help(self) -> str:
        """The option's block of the help text, each line ended."""
        head = self._head()
        lines = _wrapped(self.text)
        if self.env:
            lines.append(f"(env: {self.env})")
        if len(head) > _COLUMN - 3:
            lines.insert(0, head)
        else:
            lines[0] = head.ljust(_COLUMN) + lines[0]
        indent = " " * _COLUMN
        return "".join(f"{indent if number else ''}{line}\n" for number, line in enumerate(lines))

    def _head(self) -> str:
        first, *others = self.spellings
        aligned = f"{first}, ".ljust(7) + ", ".join(others) if others else first
        return f"{aligned} {self.argument}" if self.argument else aligned


def _has(params: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(params, name):
            return False
        params = getattr(params, name)
    return True


def _wrapped(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n"):
        # textwrap would break at hyphens and cost an import; llama.cpp breaks only at blanks.
        line, *words = paragraph.split(" ")
        for word in words:
            if len(line) + 1 + len(word) > _WIDTH:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}"
        lines.append(line)
    return lines
