"""Decides which lines of llama-server's output are trusted.

llama-server quotes invalid requests at its default verbosity, including their line feeds (b11434: ``error
parsing grammar``), so a client can write any line to the log, also one with a time stamp. Two rules keep such
lines out of diagnoses and messages (X13). Before the first request has reached the server, every line is
trusted. After that, only the last lines are trusted, and only in the forms below. Up to ``_MAX_OTHER_LINES``
lines about other requests may stand among them, but none that llama-server writes when it continues with a
quoted request.

The second rule has a limit: nothing in the log shows who wrote a line. A client can forge a line of such a
form if its text is the last that llama-server logs before it aborts, except for lines about other requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

# `0.00.004.111 E cmn  common_init_: …`: minutes.seconds.ms.us and a level, since about b6000. The level is
# missing if another thread wrote its own line after the time.
STAMP = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} (?:(?P<level>[A-Z]) +)?")

# The patterns below are text, which re compiles and keeps at the first use: compiled at the import, those of
# this module and of diagnosis.py would cost 8 ms of every start.
# A loading server logs the path of a request (builds before 2026), and its Origin.
_QUOTES = r"\(CORS\) skip|log_server_r\w*: |done request: "


def quotes_client(line: str) -> bool:
    """Return whether a loading server quotes a request in this line."""
    return re.search(_QUOTES, line) is not None


def trusted_head(lines: Sequence[str]) -> list[str]:
    """Return the trusted lines of a server that was not ready yet: those before the first quoted request.

    Only `wrap` forwards requests to a loading server.
    """
    return list(takewhile(lambda line: not quotes_client(line), lines))


# Each pattern is one complete message, without the function name before it. The variable parts are bounded,
# and allow only the characters that the source code puts there: digits, names, words.
_DEVICE = r"(?:CUDA|HIP|ROCm|MUSA|SYCL|Vulkan|Metal)"
_VULKAN = r"vk::[\w:]{1,60}: Error[A-Za-z]{1,40}"
_ERRORS = "|".join(
    (
        _DEVICE + r" error: [A-Za-z][\w ,.'()/-]{0,120}",
        r"allocating [\d.]{1,20} MiB on device \d{1,3}: \w{1,40} failed: out of memory",
        r"(?:unable|failed) to allocate (?:[\w-]{1,40} )?(?:buffer|compute buffers)(?: of size \d{1,20})?",
        r"insufficient memory \(attempted to allocate {1,10}[\d.]{1,20} MB\)",
        r"ggml_backend_sched_graph_compute_async failed with error -?\d{1,9}",
        r"failed to compute graph, compute status: -?\d{1,9}",
        r"Device memory allocation of size \d{1,20} failed\.?",
        r"command buffer \d{1,9} failed with status \d{1,9}",
        # Of RPC: another thread may write it after the message of the abort.
        r"(?:send|recv) failed \(bytes_(?:sent|recv)=-?\d{1,20}, size_to_(?:send|recv)=\d{1,20}\)",
        r"error: Insufficient Memory \(\w{1,20}:kIOGPU\w{1,60}\)",
        r"error: (?:std::bad_alloc|Cannot allocate memory)",
        r"got exception: std::bad_alloc",
        r"Cannot allocate memory",
        r"MemoryError",
        _VULKAN,
    )
)
# A source file may be in a folder with a blank in its name, or on a drive of Windows.
_FILE_LINE = r"(?:[A-Za-z]:)?[\w./\\+@ -]{1,300}\.(?:c|cc|cpp|cu|cuh|h|hpp|m|metal):\d{1,6}: "
# A list, because a pattern could match text of a client. Without `std::bad_alloc`, which decides a cause.
_TYPE = "|".join(
    (
        r"std::(?:exception|runtime_error|logic_error|out_of_range|invalid_argument|length_error|domain_error)",
        r"std::(?:range_error|overflow_error|underflow_error|system_error|future_error|bad_array_new_length)",
        r"std::(?:bad_cast|bad_typeid|bad_function_call|bad_optional_access|bad_variant_access|bad_weak_ptr)",
        r"std::(?:__cxx11::|__1::)?regex_error",
        r"std::(?:filesystem|__1::__fs::filesystem)::(?:__cxx11::)?filesystem_error",
        r"nlohmann::(?:json_abi_v\d{1,2}_\d{1,2}_\d{1,2}::)?detail::"
        r"(?:parse_error|type_error|out_of_range|invalid_iterator|other_error)",
        r"vk::(?:OutOfDeviceMemory|OutOfHostMemory|DeviceLost|System|InitializationFailed|MemoryMapFailed|"
        r"Fragmentation|FragmentedPool|OutOfPoolMemory|Unknown)Error",
    )
)
# The text of an uncaught exception may quote a client, line feeds included: only its type is trusted.
_THROWN = rf"terminate called after throwing an instance of '(?:{_TYPE})'"
_LIBCXX_PREFIX = r"libc\+\+abi: terminating (?:due to|with) uncaught exception of type "
_LIBCXX = rf"{_LIBCXX_PREFIX}(?:{_TYPE})(?=:|$)"
_SHAPES = (
    rf"(?:[EWI] +)?(?:(?:srv|slot|cmn|que|res|spec) +)?(?:[\w~<>-]{{1,80}}: +){{0,3}}(?:{_ERRORS})"
    rf"|{_FILE_LINE}GGML_ASSERT\([^\"`]{{1,300}}\) failed"
    rf"|{_THROWN}"
    r"|terminate called (?:without an active exception|recursively)"
    rf"|  what\(\):  (?:std::bad_alloc|{_VULKAN})"
    rf"|{_LIBCXX_PREFIX}std::bad_alloc: std::bad_alloc"
)
# The message of an abort is cut at the first character that may begin a quotation.
_ABORT = rf"{_FILE_LINE}[A-Za-z][\w ,.()/+-]{{0,160}}"
_WHAT = r"  what\(\):"
# Lines about other requests: of other threads, or still in llama-server's queue when it aborted. Not those
# that come after a quotation because llama-server continues with that request.
_OTHER_REQUEST = r"(?:slot |srv +log_server_r: )(?!.*(?:selected slot|processing task|new prompt))"
_MAX_OTHER_LINES = 4
# A line that llama-server was writing when it ended.
_INCOMPLETE = r"\d+\.\d\d\.\d{3}\.\d{3} ?(?:[A-Z] *)?"
# Lines between such a message and the end of the log: the location of a CUDA error, and a backtrace.
_SKIPPED = (
    r"\s*"
    r"|terminate called after throwing an instance of 'std::bad_alloc'"
    r"| *current device: \d+, in function .+"
    r"| *\w+\(.*\)| *err"
    r"|#\d+ .*|\d+: 0x[0-9a-f]+ .*"
    r"|\S+\([^()]*\) ?\[0x[0-9a-f]+\]"
    r"|\d{1,3} +\S.{0,80}? +0x[0-9a-f]{8,16} \S.{0,1000}? \+ \d{1,9}"  # backtrace_symbols() of macOS
    r"|0x[0-9a-f]+ in .*|\d+\t.*"
    r"|\[(?:New LWP|Thread debugging|Inferior|Current thread).*\]"
    r"|Using host libthread_db library .*|warning: .*|WARNING: .*backtrace.*|This GDB supports .*"
    r"|See: https://github\.com/ggml-org/\S+|Enable debuginfod .*|Debuginfod has been .*"
    r"|(?:Could not attach to process|ptrace: |No stack|The program is not being run).*"
)


def trusted_tail(lines: Sequence[str]) -> list[str]:
    """Return the trusted lines at the end of the log of a server that was ready, without time stamps."""
    tail: list[str] = []
    others = 0
    is_quotation = False  # after a line of unknown origin, which may be the text of an exception
    if lines and re.fullmatch(_INCOMPLETE, lines[-1]):
        lines = lines[:-1]
    for number, line in reversed(list(enumerate(lines))):
        stamp = STAMP.match(line)
        text = line[stamp.end() :] if stamp else line
        trusted = _trusted_text(text)
        if stamp and stamp["level"]:
            if is_quotation:
                break
            if not trusted and not re.fullmatch(_SKIPPED, text):
                others += 1
                if others > _MAX_OTHER_LINES or stamp["level"] != "I" or not re.match(_OTHER_REQUEST, text):
                    break
        elif re.match(_WHAT, text) and not trusted:
            found = re.fullmatch(_THROWN, STAMP.sub("", lines[number - 1])) if number else None
            return [found[0]] if found else []
        elif text.startswith("libc++abi: ") and not trusted:
            found = re.match(_LIBCXX, text)
            return [found[0]] if found else []
        elif not trusted and not re.fullmatch(_SKIPPED, text):
            is_quotation = True
        if trusted and not is_quotation:
            tail.append(trusted)
    tail.reverse()
    return tail


def _trusted_text(line: str) -> str:
    if re.fullmatch(_SHAPES, line):
        return line
    found = re.match(_ABORT, line)
    return found[0].rstrip() if found else ""
