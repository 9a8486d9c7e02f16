"""A llama-server without a model: a real child process that does what llama-server does, or what it must not.

``python -m tests.kit.fake_server``, or the executable that ``install`` writes, takes llama-server's
command line (the options in ``fake_help.txt``, a part of b11434's own ``--help``), logs as it logs, binds
before it loads, answers its endpoints on a Unix socket or a port, and stops as it stops. It misbehaves as
``--fake KEY=VALUE`` says (``faults.py``).
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from llamasup.core.system.native import native
from tests.kit.fake_http import HttpServer
from tests.kit.faults import Faults

__all__ = ["install", "main"]

_HELP = Path(__file__).with_name("fake_help.txt")
_VERSION = "version: 0.6.0-fake (build 1, commit abcdef0)\nbuilt with nothing for tests"
_DEVICES = "Available devices:\n  (none)"
_STARTED = time.monotonic()


def install(path: Path, *fakes: str) -> Path:
    """Write an executable that behaves as a llama-server which misbehaves as ``fakes`` say; return its path.

    It works with an empty environment, from any working folder.
    """
    root = Path(__file__).parents[2]
    options = [part for fake in fakes for part in ("--fake", fake)]
    # No shebang with the interpreter: its path may hold spaces or be too long for the kernel.
    # A script is asked what it can do before each start: sh answers that in a tenth of the time.
    script = path.with_name(f".{path.name}.new")
    script.write_text(
        "#!/bin/sh\n"
        'case "$#$1" in\n'
        f"1--help) printf %s {shlex.quote(_HELP.read_text(encoding='utf-8'))}; exit ;;\n"
        f"1--version) echo {shlex.quote(_VERSION)} >&2; exit ;;\n"
        f"1--list-devices) echo {shlex.quote(_DEVICES)}; exit ;;\n"
        "esac\n"
        f"export PYTHONPATH={shlex.quote(str(root))}\n"
        f"exec {shlex.quote(sys.executable)} -S -m tests.kit.fake_server "
        f'{shlex.join(options)} "$@"\n'
    )
    script.chmod(0o755)
    script.replace(path)  # the kernel refuses to write a file that is being executed
    return path


def main(argv: Sequence[str]) -> int:
    """Live as a llama-server lives. Returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parsed = _parse(argv)
    if isinstance(parsed, int):
        return parsed
    options, fakes = parsed
    faults = Faults.parse(fakes).under(options)
    faults.die("start")
    if faults.grandchild == "exit":
        return _sleeper()
    if faults.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say("I srv  llama_server: initializing ...")
    faults.make_noise()
    listener = _bind(options)
    if listener is None:
        return 1
    server = HttpServer(listener, faults, options)
    if faults.bind == "ok":
        threading.Thread(target=server.serve, daemon=True).start()
    code = _load(options, faults)
    if code != 0:
        return code
    signalled, wake = os.pipe()  # an event would miss a signal just before the wait
    if not faults.ignore_sigterm:
        # From here on SIGTERM is a request; while loading it kills (b11434).
        native.set_nonblocking(wake)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
    server.ready = True
    _say("I srv  llama_server: model loaded")
    _say(f"I srv  llama_server: listening on {_shown(listener)}")
    if faults.grandchild == "stay":
        _sleeper()
    if faults.log_forever:
        threading.Thread(target=_flood, daemon=True).start()
    if faults.close_output:
        # The descriptors, not the objects: the threads of this process may still print.
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    faults.die("ready")
    return _wait_for_the_end(server, signalled)


def _load(options: dict[str, str], faults: Faults) -> int:
    model = options.get("--model", "")
    _say(f"I srv    load_model: loading model '{model}'")
    if faults.fit_warning:
        _say(
            "W cmn  common_fit_params: failed to fit params to free device memory: "
            "n_ctx_min is too large, abort"
        )
    faults.die("load")
    end = time.monotonic() + faults.load_s
    while (left := end - time.monotonic()) > 0 and not faults.over:
        if not faults.spin:
            time.sleep(min(left, 0.05))
            _say("I srv    load_model: still loading")
    if not Path(model).exists():
        _say(f"E gguf_init_from_file: failed to open GGUF file '{model}' (No such file or directory)")
    elif faults.out_of_memory == "host":
        _say("E ggml_aligned_malloc: insufficient memory (attempted to allocate 1024.00 MB)")
        _say(
            "E llama_init_from_model: failed to initialize the context: "
            "failed to allocate buffer for kv cache"
        )
    elif faults.out_of_memory == "device":
        _say("E alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296")
        _say("E llama_model_load: error loading model: unable to allocate CUDA0 buffer")
    else:
        _say("I llama_context: constructing llama_context")
        faults.die("context")
        return 0
    _say(f"E srv    load_model: failed to load model, '{model}'")
    _say("I srv    operator(): operator(): cleaning up before exit...")
    _say("E srv  llama_server: exiting due to model loading error")
    return 1


def _wait_for_the_end(server: HttpServer, signalled: int) -> int:
    """The first SIGTERM ends generation and waits for the clients to leave, the second ends all (b11434).

    ``signalled``: a pipe with a byte for each.
    """
    os.read(signalled, 1)
    server.stopping.set()
    while server.open_requests:
        if select.select([signalled], [], [], 0.01)[0]:
            os._exit(1)
    _say("I srv    operator(): operator(): cleaning up before exit...")
    os._exit(0)


def _sleeper() -> int:
    """Leave a process behind that keeps the log's pipe open."""
    pid: int = getattr(os, "fork")()  # noqa: B009 - not on Windows
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3600)
        os._exit(0)
    _say(f"I srv  grandchild {pid}")
    return 0


def _flood() -> None:
    line = b"0.00.000.100 I srv  " + b"z" * 79 + b"\n"
    while True:
        os.write(2, line * 100)


# --- command line and address --------------------------------------------------------------------


def _parse(argv: Sequence[str]) -> tuple[dict[str, str], list[str]] | int:
    """The options by the longest of their spellings, and the faults; or an exit code."""
    spellings, removed = _known_options()
    options: dict[str, str] = {}
    fakes: list[str] = []
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if flag == "--fake" and rest:
            fakes.append(rest.pop(0))
        elif flag in {"-h", "--help", "--usage"}:
            sys.stdout.write(_HELP.read_text(encoding="utf-8"))
            return 0
        elif flag == "--version":
            sys.stderr.write(f"{_VERSION}\n")
            return 0
        elif flag == "--list-devices":
            sys.stdout.write(f"{_DEVICES}\n")
            return 0
        elif flag in removed:
            sys.stderr.write(f'error while handling argument "{flag}": {removed[flag]}\n\nusage:\n')
            return 1
        elif flag not in spellings:
            sys.stderr.write(f"error: invalid argument: {flag}\n")
            return 1
        else:
            name, takes_value = spellings[flag]
            if takes_value and not rest:
                sys.stderr.write(f'error while handling argument "{flag}": expected value for argument\n')
                return 1
            options[name] = rest.pop(0) if takes_value else ""
    return options, fakes


# The name by which the code above asks for an option that has several.
_NAMES = {"--model", "--host", "--port", "--alias", "--ctx-size", "--parallel", "--api-key", "--api-key-file",
          "--metrics", "--embedding", "--rerank", "--slot-save-path"}  # fmt: skip


def _known_options() -> tuple[dict[str, tuple[str, bool]], dict[str, str]]:
    spellings: dict[str, tuple[str, bool]] = {}
    removed: dict[str, str] = {}
    text = _HELP.read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("-") or line.startswith("-----"):
            continue
        shown, _, description = line[:40], line[39:40], line[40:]
        if not line[39:40].isspace():  # the spellings take the whole line, the description begins below
            shown, description = line, ""
        flags = re.findall(r"(?:^|[\s,])(--?[a-zA-Z][\w-]*)", shown)
        takes_value = re.search(r"(?:^|[\s,])--?[a-zA-Z][\w-]*[ ]+[^\s,-]", shown) is not None
        if description.startswith("the argument has been removed"):
            # It goes on in the lines below, up to the name of the environment variable.
            more = text[text.index(line) + len(line) :].partition("(env:")[0]
            removed |= dict.fromkeys(flags, " ".join([description, *more.split()]))
            continue
        name = next((flag for flag in flags if flag in _NAMES), flags[-1])
        spellings |= dict.fromkeys(flags, (name, takes_value))
    return spellings, removed


def _bind(options: dict[str, str]) -> socket.socket | None:
    host, port = options.get("--host", "127.0.0.1"), int(options.get("--port", "8080"))
    try:
        if host.endswith(".sock"):
            listener = native.unix_socket()
            listener.bind(host)
        else:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError:
        _say(f"E srv         start: couldn't bind HTTP server socket, hostname: {host}, port: {port}")
        _say("E srv  llama_server: exiting due to HTTP server error")
        return None
    listener.listen(512)
    return listener


def _shown(listener: socket.socket) -> str:
    name = listener.getsockname()
    return f"unix://{name}" if isinstance(name, str) else f"http://{name[0]}:{name[1]}"


def _say(text: str) -> None:
    us = int((time.monotonic() - _STARTED) * 1e6)
    stamp = f"{us // 60_000_000}.{us // 1_000_000 % 60:02}.{us // 1000 % 1000:03}.{us % 1000:03}"
    os.write(2, f"{stamp} {text}\n".encode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
