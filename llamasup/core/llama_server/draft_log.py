"""The line that llama-server logs about the drafts of a request, at its end.

b11434: ``0.00.078.626 I slot print_timing: id  0 | task 0 | draft acceptance = 0.57576 (   19 accepted /
33 generated), mean len =  4.88``. Older builds write ``draft acceptance rate``.
"""

from __future__ import annotations

import re

from msgspec import Struct


class Drafted(Struct, frozen=True):
    """The tokens that a draft proposed, and those that the model accepted."""

    proposed: int
    accepted: int

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(self.proposed + other.proposed, self.accepted + other.accepted)


# The whole line: other lines of a serving llama-server can quote requests.
_LINE = re.compile(
    r"[\d. IT]*slot +print_timing: id +\d+ \| task \d+ \| draft acceptance(?: rate)? = [\d.]+ "
    r"\( *(?P<accepted>\d{1,9}) accepted / *(?P<proposed>\d{1,9}) generated\)(?:, mean len = +[\d.]+)?\s*"
)

DRAFTED = re.compile(b"draft acceptance")
"""A filter over bytes that matches every line that ``read_drafted`` understands."""


def read_drafted(line: str) -> Drafted | None:
    """Return the counts in a log line; None for other lines."""
    found = _LINE.fullmatch(line)
    return None if found is None else Drafted(int(found["proposed"]), int(found["accepted"]))
