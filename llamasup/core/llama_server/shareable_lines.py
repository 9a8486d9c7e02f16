"""Selects the lines of llama-server's log that may be published, because they cannot quote a request.

A server that is not ready yet has no requests, so all its lines with a time stamp are kept. After that, only
lines that report work in numbers are kept, and the trusted errors at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llamasup.core.llama_server.log_lines import Ready, read_line
from llamasup.core.llama_server.trusted_lines import STAMP, quotes_client, trusted_tail

_WORK = re.compile(
    r"slot +[\w()]+: id +\d+ \| task -?\d+ \| +(?:"
    r"(?:prompt eval|eval|total) time =[ =|/()\d.,msperotkncd]+"
    r"|graphs reused = +\d+"
    r"|processing task, is_child = \d"
    r"|stop processing: n_tokens = \d+, truncated = \d"
    r"|new prompt, n_ctx_slot = \d+, n_keep = -?\d+, task\.n_tokens = \d+"
    r"|cached n_tokens = \d+, memory_seq_rm \[\d+, end\))"
)
# Long, and in the model's file; and the last letters of a key.
_LEFT_OUT = re.compile(r"llama_model_loader: - kv |api_keys?\b")
# A log whose first time stamp is later begins in the middle: the server may have been ready.
_FIRST_LINE_S = 0.01


def shareable_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the last ``most`` shareable lines, of one or several processes in turn."""
    kept: list[str] = []
    for number, log in enumerate(_logs(lines)):
        began_s = next((at_s for line in log if (at_s := _seconds(line)) is not None), _FIRST_LINE_S)
        kept += _of_process(log, from_start=number > 0 or began_s < _FIRST_LINE_S)
    return kept[-most:]


def _logs(lines: Sequence[str]) -> Iterator[list[str]]:
    """The lines of each process, whose time stamps begin at zero."""
    log: list[str] = []
    last_s = 0.0
    for line in lines:
        at_s = _seconds(line)
        if at_s is not None:
            if at_s < last_s and log:
                yield log
                log = []
            last_s = at_s
        log.append(line)
    if log:
        yield log


def _seconds(line: str) -> float | None:
    """The time of the line since the start of the server; None without a time stamp."""
    if STAMP.match(line) is None:
        return None
    minutes, seconds, milliseconds, microseconds = line.split(" ", 1)[0].split(".")
    return int(minutes) * 60 + int(seconds) + int(milliseconds) / 1e3 + int(microseconds) / 1e6


def _of_process(log: Sequence[str], *, from_start: bool) -> Iterator[str]:
    served_from = _first_served(log) if from_start else 0
    for line in log[:served_from]:
        if STAMP.match(line) and not _LEFT_OUT.search(line):
            yield line
    for line in log[served_from:]:
        if (stamp := STAMP.match(line)) and _WORK.fullmatch(line[stamp.end() :].rstrip()):
            yield line
    yield from trusted_tail(log[served_from:])


def _first_served(log: Sequence[str]) -> int:
    """The index of the first line that may be about a request."""
    for number, line in enumerate(log):
        if quotes_client(line):
            return number
        if isinstance(read_line(line), Ready):
            return number + 1
    return len(log)
