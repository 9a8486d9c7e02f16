"""The main program: answers ``--help``, ``--version`` and ``--list-devices``, or parses the options and
serves.

Output and exit codes are llama-server's (b11434): 0 for an answer, 1 for an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from llamasup.embedded.arguments import ArgumentError, apply, parse
from llamasup.embedded.option import Option, Question
from llamasup.embedded.options_common import COMMON, SAMPLING
from llamasup.embedded.options_server import SERVER, SPECULATIVE
from llamasup.errors import without_errno

Section = tuple[str, tuple[Option, ...]]

_TABLE: tuple[Section, ...] = (
    ("common params", COMMON),
    ("sampling params", SAMPLING),
    ("speculative params", SPECULATIVE),
    ("example-specific params", SERVER),
)
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
        _drop_stdout()
    except ImportError as error:
        sys.stderr.write(
            f"error: the embedded runtime cannot load xllamacpp ({error}): pip install 'llamasup[embedded]'\n"
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

    from llamasup.embedded.server import serve

    return serve(params)


def _answer(question: Question, table: tuple[Section, ...], module: Any) -> None:
    if question == "help":
        sys.stdout.write(help_text(table))
    elif question == "version":
        build = module.BUILD_INFO
        sys.stderr.write(
            f"version: {module.__version__} (xllamacpp; llama.cpp build {build['build_number']}, "
            f"commit {build['commit']})\nbuilt with {build['compiler']} for {build['build_target']}\n"
        )
    else:
        sys.stdout.write(device_list(module))
    sys.stdout.flush()


def supported(params: object) -> tuple[Section, ...]:
    """The table without the options that this ``CommonParams`` does not support."""
    return tuple(
        (title, tuple(option for option in options if option.is_possible(params)))
        for title, options in _TABLE
    )


def options_of(table: tuple[Section, ...]) -> tuple[Option, ...]:
    return tuple(option for _, options in table for option in options)


def help_text(table: tuple[Section, ...]) -> str:
    return "\n\n".join(
        f"----- {title} -----\n\n" + "".join(option.help() for option in options) for title, options in table
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
    """Use the CPU settings for generation for batches too, and the model's for the draft model.

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


def _drop_stdout() -> None:
    # Flushing the buffer at exit must not raise again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
