"""The log lines of llama-server that llamasup reacts to at once, as b11434 and older builds write them, and
those that may be published.

``read_line`` reads those of a start, ``read_drafted`` the line about the drafts of a request, at its end.

``shareable_lines`` selects lines that cannot quote a request. A server that is not ready yet has no requests,
so all its lines with a time stamp are kept. After that, only lines that report work in numbers are kept, and
the trusted errors at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.trusted_lines import STAMP, quotes_client, trusted_tail


class Ready(Struct, frozen=True):
    """The server says that it listens. Only a hint to probe ``/health`` at once."""


class StartupFailure(Struct, frozen=True):
    """The server still loads, but the start will fail."""

    diagnosis: Diagnosis


class Warned(Struct, frozen=True):
    """The server will serve, but not everything works as configured."""

    message: str
    remedy: str


class SizeLogged(Struct, frozen=True):
    """A line for :func:`llamasup.core.llama_server.memory_log.read_sizes`."""


class StageBegan(Struct, frozen=True):
    """A stage of the load begins (``planning/measured/load_times.py``)."""

    stage: Literal["weights", "warm_up"]


StartLogEvent = Ready | StartupFailure | Warned | SizeLogged | StageBegan

_READY = re.compile(r"listening on|server is listening|model loaded")
# After this warning llama-server goes on loading and runs out of memory (#27872). With "already set by user"
# it was not to fit the model at all.
_FIT_FAILED = re.compile(r"failed to fit params to free device memory: (?!.*already set by user)(?P<why>.+)")
_DRAFT_IGNORED = re.compile(
    r"(?P<why>(?:the )?target and draft vocabs are not compatible|"
    r"failed to initialize speculative decoding context.*)"
)
_SIZE = re.compile(r"buffer size|model size|n_ctx +=|CLIP using|fitting params")
# At any log level: "load_model: loading model 'x.gguf'", and once the context has its memory
# "llama threadpool init" and "warming up the model with an empty run".
_WEIGHTS = re.compile(r"load_model: +loading model\b|loading model tensors")
_WARM_UP = re.compile(r"llama threadpool init|warming up the model")

RELEVANT = re.compile(
    "|".join(pattern.pattern for pattern in (_READY, _SIZE, _WEIGHTS, _WARM_UP)).encode()
    + b"|failed to|vocabs are not"
)
"""A filter over bytes that matches every line that ``read_line`` understands."""


def read_line(line: str) -> StartLogEvent | None:
    """Return the meaning of a log line; None for other lines, and for lines that quote a request."""
    if quotes_client(line):
        return None
    if _READY.search(line):
        return Ready()
    if found := _FIT_FAILED.search(line):
        return StartupFailure(
            Diagnosis(
                cause="fit_failed",
                message=f"llama-server reports that the model does not fit: {found['why'].rstrip('.')}.",
                remedy="Free the device's memory, set fewer --gpu-layers, or use a smaller --ctx-size, fewer "
                "--parallel slots or a smaller quantization.",
                lines=(line,),
                deterministic=True,
                exit_code=71,
            )
        )
    if found := _DRAFT_IGNORED.search(line):
        return Warned(
            f"llama-server does not use the draft model: {found['why'].rstrip('.')}.",
            "Use a draft model of the same family (same tokenizer), or none.",
        )
    if _SIZE.search(line):
        return SizeLogged()
    if _WARM_UP.search(line):
        return StageBegan("warm_up")
    return StageBegan("weights") if _WEIGHTS.search(line) else None


# --- drafts ---------------------------------------------------------------------------------------


class Drafted(Struct, frozen=True):
    """The tokens that a draft proposed, and those that the model accepted."""

    proposed: int
    accepted: int

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(self.proposed + other.proposed, self.accepted + other.accepted)


# b11434: ``0.00.078.626 I slot print_timing: id  0 | task 0 | draft acceptance = 0.57576 (   19 accepted /
# 33 generated), mean len =  4.88``. Older builds write ``draft acceptance rate``.
# The whole line: other lines of a serving llama-server can quote requests.
_DRAFTED = re.compile(
    r"[\d. IT]*slot +print_timing: id +\d+ \| task \d+ \| draft acceptance(?: rate)? = [\d.]+ "
    r"\( *(?P<accepted>\d{1,9}) accepted / *(?P<proposed>\d{1,9}) generated\)(?:, mean len = +[\d.]+)?\s*"
)

DRAFTED = re.compile(b"draft acceptance")
"""A filter over bytes that matches every line that ``read_drafted`` understands."""


def read_drafted(line: str) -> Drafted | None:
    """Return the counts in a log line; None for other lines."""
    found = _DRAFTED.fullmatch(line)
    return None if found is None else Drafted(int(found["proposed"]), int(found["accepted"]))


# --- lines that may be published -------------------------------------------------------------------

# Text, which re compiles and keeps at the first use: no start needs it.
_WORK = (
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
        if (stamp := STAMP.match(line)) and re.fullmatch(_WORK, line[stamp.end() :].rstrip()):
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
