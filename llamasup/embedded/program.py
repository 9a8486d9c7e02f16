"""The main program: answers ``--help``, ``--version`` and ``--list-devices``, or parses the options and
serves.

Output and exit codes are llama-server's (b11434): 0 for an answer, 1 for an error.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamasup.core.system.extras import install_command
from llamasup.core.system.native import native
from llamasup.embedded.arguments import ArgumentError, apply, parse
from llamasup.embedded.option import Option, Question, options_by_section
from llamasup.embedded.options import SETTERS
from llamasup.errors import without_errno

Section = tuple[str, tuple[Option, ...]]

_DEFAULT_PORT = 8080
_AUTO_SLOTS = -1
_MIB = 1024 * 1024


def main(arguments: Sequence[str]) -> int:
    """The exit code of ``llama-server ARGUMENTS…``. Never raises for invalid arguments."""
    try:
        return _run(arguments)
    except ArgumentError as error:
        sys.stderr.write(str(error))
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # flushing the buffer at exit must not raise again
    except ImportError as error:
        sys.stderr.write(
            f"error: the embedded runtime cannot load xllamacpp ({error}). "
            f"Install it: {install_command('embedded', again=True)}\n"
        )
    except Exception as error:
        sys.stderr.write(f"error: {type(error).__name__}: {without_errno(str(error))}\n")
    return 1


def _run(arguments: Sequence[str]) -> int:
    import xllamacpp

    params = xllamacpp.CommonParams()
    # llama-server's own defaults; xllamacpp's are a random port and one slot.
    params.port = _DEFAULT_PORT
    params.n_parallel = _AUTO_SLOTS
    table = supported(params)
    request = parse(options_of(table), arguments, os.environ)
    if request.asks is not None:
        _answer(request.asks, table, xllamacpp)
        return 0
    sys.stderr.write("".join(request.warnings))
    apply(params, request.assignments)
    _share_cpus(params)
    if not params.model.path:
        raise ArgumentError(
            "error: no model given: pass --model FNAME (llama-server would start its router without one, "
            "the embedded runtime serves one model)\n"
        )

    return serve(params)


def _answer(question: Question, table: tuple[Section, ...], module: Any) -> None:
    if question == "help":
        sys.stdout.write(help_text(table))
    elif question == "version":
        build = module.BUILD_INFO
        sys.stderr.write(
            f"version: {version_text(module.__version__, build['build_number'], build['commit'])}\n"
            f"built with {build['compiler']} for {build['build_target']}\n"
        )
    else:
        sys.stdout.write(device_list(module))
    sys.stdout.flush()


def version_text(version: str, build: int, commit: str) -> str:
    """Return the version for ``--version``. Wheels of xllamacpp do not know the build of llama.cpp in them:
    it is the last part of their version.
    """
    release, _, last = version.rpartition(".")
    if not build and re.fullmatch(r"\d{4,}", last):
        return f"xllamacpp {release} (b{last})"
    return f"xllamacpp {version} (llama.cpp build {build}, commit {commit})"


def supported(params: object) -> tuple[Section, ...]:
    """The options by section, without those that this ``CommonParams`` does not support."""
    # What llama-server (b11434) prints for --help, without the options that the embedded runtime cannot have.
    text = Path(__file__).with_name("help.txt").read_text("utf-8")
    return tuple(
        (title, tuple(option for option in options if option.is_possible(params)))
        for title, options in options_by_section(text, SETTERS)
    )


def options_of(table: tuple[Section, ...]) -> tuple[Option, ...]:
    return tuple(option for _, options in table for option in options)


def help_text(table: tuple[Section, ...]) -> str:
    return "\n\n".join(
        f"----- {title} -----\n\n" + "".join(option.usage for option in options) for title, options in table
    )


def device_list(module: Any) -> str:
    """The answer to ``--list-devices``: only accelerators, like in llama-server."""
    cpu = module.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    lines = [
        f"  {device['name']}: {device['description']} "
        f"({device['memory_total'] // _MIB} MiB, {device['memory_free'] // _MIB} MiB free)\n"
        for device in module.get_device_info()
        if device["type"] != cpu
    ]
    return "Available devices:\n" + ("".join(lines) or "  (none)\n")


def _share_cpus(params: Any) -> None:
    """Use the CPU settings for generation also for batches, and the model's for the draft model.

    llama.cpp does this after parsing the options (b11434, ``postprocess_cpu_params``), xllamacpp does not.
    """
    if params.cpuparams_batch.n_threads < 0:
        params.cpuparams_batch = params.cpuparams
    draft = getattr(params.speculative, "draft", None)
    if draft is not None:
        if draft.cpuparams.n_threads < 0:
            draft.cpuparams = params.cpuparams
        if draft.cpuparams_batch.n_threads < 0:
            draft.cpuparams_batch = params.cpuparams_batch


# The destructor tells the task loop to end. If the loop's thread has not begun the loop yet, it misses that
# and runs for ever (seen when stopped 20 to 200 µs after ready; xllamacpp 2026.10). A machine whose cores are
# all busy starts the thread later: 50 ms were once too short.
_LOOP_BEGINS_S = 0.25

# The server's text if llama.cpp's log has the reason.
_LOGGED = "Failed to init server"


def serve(params: Any) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Until the model is loaded these signals end the process at once, as they do llama-server; the first one
    after that stops the server when its current batch is done, and a second one ends the process at once.
    """
    import xllamacpp

    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError, MemoryError) as error:
        if _LOGGED not in str(error):
            sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        _flush_log(xllamacpp.xllamacpp.__file__)
        return 1
    sockets = _SocketFiles(params.hostnames)
    ready_at = time.monotonic()
    native.wait_for_stop()
    sockets.remove()  # before the server closes them, so that no new file can get their inodes
    time.sleep(max(0.0, ready_at + _LOOP_BEGINS_S - time.monotonic()))
    del server
    return 0


def _flush_log(library: str) -> None:
    """Wait for the thread that writes llama.cpp's log: the process could end before the line that says why
    (1 of 558 starts on a port in use, eight at a time; xllamacpp 2026.10). xllamacpp has no call for it.
    """
    import ctypes

    functions = ctypes.CDLL(library)
    try:
        log, flush = functions._Z15common_log_mainv, functions._Z16common_log_flushP10common_log
    except AttributeError:  # other symbol names (Windows)
        return
    log.restype = ctypes.c_void_p
    flush.argtypes, flush.restype = [ctypes.c_void_p], None
    flush(log())


class _SocketFiles:
    """The Unix sockets that this process made. It removes them unless they were replaced: a supervisor may
    have put the next generation's socket at the same path.
    """

    __slots__ = ("_made",)

    def __init__(self, hostnames: list[str]) -> None:
        self._made = {path: identity for path in hostnames if (identity := _identity(path))}

    def remove(self) -> None:
        for path, identity in self._made.items():
            if _identity(path) == identity:
                Path(path).unlink(missing_ok=True)


def _identity(path: str) -> tuple[int, int] | None:
    if not path.endswith(".sock"):
        return None
    try:
        status = Path(path).lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
