"""The log lines of llama-server that llamasup reacts to at once, as b11434 and older builds write them.

``read_line`` reads those of a start, ``read_drafted`` the line about the drafts of a request, at its end.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.trusted_lines import quotes_client


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
