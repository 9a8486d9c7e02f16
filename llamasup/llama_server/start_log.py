"""What a starting llama-server says that matters at once, line by line.

Wordings of b11434; ``model loaded`` and ``server is listening`` are older builds' too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.last_words import quotes_client

__all__ = ["TELLING", "Ready", "SizeTold", "StartLogEvent", "StartupFailure", "Warned", "read_line"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A hint only: it makes the prober look at once."""


@dataclass(frozen=True, slots=True)
class StartupFailure:
    """It loads on, and cannot end well."""

    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Warned:
    """It will serve, but not as it was asked to."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class SizeTold:
    """A line for :func:`llamasup.llama_server.memory_log.read_sizes`."""


StartLogEvent = Ready | StartupFailure | Warned | SizeTold

_READY = re.compile(r"listening on|server is listening|model loaded")
# A warning after which llama-server loads all the same, and runs out of memory (#27872). "already set by
# user" only says that it was not asked to fit.
_FIT_FAILED = re.compile(r"failed to fit params to free device memory: (?!.*already set by user)(?P<why>.+)")
_DRAFT_IGNORED = re.compile(
    r"(?P<why>(?:the )?target and draft vocabs are not compatible|"
    r"failed to initialize speculative decoding context.*)"
)
_SIZE = re.compile(r"buffer size|model size|n_ctx +=|CLIP using|fitting params")

TELLING = re.compile(
    "|".join(each.pattern for each in (_READY, _SIZE)).encode() + b"|failed to|vocabs are not"
)
"""What any line that ``read_line`` understands matches, for a filter over bytes."""


def read_line(line: str) -> StartLogEvent | None:
    """The meaning of a line of the log; None for other lines, and for a line that quotes a request."""
    if quotes_client(line):
        return None
    if _READY.search(line):
        return Ready()
    if found := _FIT_FAILED.search(line):
        return StartupFailure(
            Diagnosis(
                cause="fit_failed",
                message=f"llama-server found that the model does not fit: {found['why'].rstrip('.')}.",
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
    return SizeTold() if _SIZE.search(line) else None
