"""Which lines of llama-server's output are trusted: lines that no client can have written.

llama-server quotes invalid requests at its default verbosity, including their line feeds (b11434: ``error
parsing grammar``), so a client can write any line to the log. Two rules keep such lines out of diagnoses and
messages (X13). Before the first request has reached the server, every line is trusted. After that, only the
last lines are trusted, and only in the forms below: the message of an abort ends the output, but llama-server
writes more lines after a quoted request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

__all__ = ["STAMP", "last_words", "own_lines", "quotes_client"]

# `0.00.004.111 E cmn  common_init_: …`: minutes.seconds.ms.us and a level, since about b6000.
STAMP = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] +")

# The lines that a loading server writes about a request: the path (builds before 2026), and the Origin.
_QUOTES = re.compile(r"\(CORS\) skip|log_server_r\w*: |done request: ")


def quotes_client(line: str) -> bool:
    """Whether a loading server quotes a request in this line."""
    return _QUOTES.search(line) is not None


def own_lines(lines: Sequence[str]) -> list[str]:
    """The trusted lines of a server that was not ready yet: those before the first quoted request.

    Only `wrap` forwards requests to a loading server.
    """
    return list(takewhile(lambda line: not quotes_client(line), lines))


# Each pattern is one complete message, without the function name before it. The variable parts are bounded,
# and allow only the characters that the source code puts there: digits, names, words.
_DEVICE = r"(?:CUDA|HIP|ROCm|MUSA|SYCL|Vulkan|Metal)"
_VULKAN = r"vk::[\w:]{1,60}: Error[A-Za-z]{1,40}"
_SAYS_WHY = "|".join(
    (
        _DEVICE + r" error: [A-Za-z][\w ,.'()/-]{0,120}",
        r"allocating [\d.]{1,20} MiB on device \d{1,3}: \w{1,40} failed: out of memory",
        r"(?:unable|failed) to allocate (?:[\w-]{1,40} )?(?:buffer|compute buffers)(?: of size \d{1,20})?",
        r"insufficient memory \(attempted to allocate {1,10}[\d.]{1,20} MB\)",
        r"ggml_backend_sched_graph_compute_async failed with error -?\d{1,9}",
        r"failed to compute graph, compute status: -?\d{1,9}",
        r"Device memory allocation of size \d{1,20} failed\.?",
        r"command buffer \d{1,9} failed with status \d{1,9}",
        r"error: Insufficient Memory \(\w{1,20}:kIOGPU\w{1,60}\)",
        r"error: (?:std::bad_alloc|Cannot allocate memory)",
        r"got exception: std::bad_alloc",
        r"Cannot allocate memory",
        r"MemoryError",
        _VULKAN,
    )
)
_FILE_LINE = r"[\w./+@-]{1,300}\.(?:c|cc|cpp|cu|cuh|h|hpp|m|metal):\d{1,6}: "
_SHAPES = re.compile(
    rf"(?:[EWI] +)?(?:(?:srv|slot|cmn|que|res|spec) +)?(?:[\w~<>-]{{1,80}}: +){{0,3}}(?:{_SAYS_WHY})"
    rf"|{_FILE_LINE}GGML_ASSERT\([^\"`]{{1,300}}\) failed"
    r"|terminate called after throwing an instance of '[\w:<>, ]{1,120}'"
    r"|terminate called (?:without an active exception|recursively)"
    rf"|  what\(\):  (?:std::bad_alloc|{_VULKAN})"
)
# The message of an abort is cut at the first character that may begin a quotation.
_ABORT = re.compile(rf"{_FILE_LINE}[A-Za-z][\w ,.()/+-]{{0,160}}")
_WHAT = re.compile(r"  what\(\):")
# Lines between such a message and the end of the log: the location of a CUDA error, and a backtrace.
_SKIPPED = re.compile(
    r"\s*"
    r"| *current device: \d+, in function .+"
    r"| *\w+\(.*\)| *err"
    r"|#\d+ .*|\d+: 0x[0-9a-f]+ .*"
    r"|\S+\([^()]*\) ?\[0x[0-9a-f]+\]"
    r"|0x[0-9a-f]+ in .*|\d+\t.*"
    r"|\[(?:New LWP|Thread debugging|Inferior|Current thread).*\]"
    r"|Using host libthread_db library .*|warning: .*|WARNING: .*backtrace.*|This GDB supports .*"
    r"|See: https://github\.com/ggml-org/\S+|Enable debuginfod .*|Debuginfod has been .*"
    r"|(?:Could not attach to process|ptrace: |No stack|The program is not being run).*"
)


def last_words(lines: Sequence[str]) -> list[str]:
    """The trusted lines at the end of the log of a server that was ready, without time stamps."""
    words = list(_backwards(lines))
    words.reverse()
    return words


def _backwards(lines: Sequence[str]) -> Iterator[str]:
    if any(_WHAT.match(line) and not _SHAPES.fullmatch(line) for line in lines):
        # The text of an uncaught exception may come from a client, up to the last line.
        yield from (line for line in reversed(lines) if line.startswith("terminate called ") and _known(line))
        return
    for line in reversed(lines):
        line = STAMP.sub("", line)
        if words := _known(line):
            yield words
        elif not _SKIPPED.fullmatch(line):
            return


def _known(line: str) -> str:
    if _SHAPES.fullmatch(line):
        return line
    found = _ABORT.match(line)
    return found[0].rstrip() if found else ""
