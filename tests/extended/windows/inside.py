"""Runs in the Windows Python for a whole session: starts, watches and ends processes there.

It reads a line of JSON for each question, ``[number, question, arguments…]``, and writes one for each
answer, ``["answer", number, value, error]``. In between it writes what the started processes do: ``["stdout",
name, line]``, ``["stderr", name, line]`` and, after all lines, ``["exit", name, code]``. These processes have
pipes of Windows, which end with them: a pipe of Linux would be kept open by Wine's consoles and services.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import psutil

_NO_WINDOW, _DETACHED = 0x08000000, 0x8  # CREATE_NO_WINDOW, DETACHED_PROCESS: mypy checks it for Linux
_CTRL_C = Path(__file__).parents[3] / "llamasup/core/system/native/console_stop.py"


class Session:
    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._files: list[IO[bytes]] = []
        self._write = threading.Lock()

    def serve(self) -> None:
        for line in sys.stdin:
            number, question, *arguments = json.loads(line)
            try:
                value, error = getattr(self, question)(*arguments), None
            except (OSError, psutil.Error, ValueError) as failed:
                value, error = None, repr(failed)
            self._say("answer", number, value, error)

    def start(self, name: str, argv: list[str], env: dict[str, str], stdin: str | None) -> int:
        """In a console of its own, without a window. ``stdin``: a file; None: a pipe. Returns its ID."""
        with contextlib.ExitStack() as opened:
            popen = self._running[name] = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if stdin is None else opened.enter_context(open(stdin, "rb")),  # noqa: PTH123
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **env},
                creationflags=_NO_WINDOW,
            )
        threading.Thread(target=self._follow, args=(name, popen), daemon=True).start()
        return popen.pid

    def write(self, name: str, text: str) -> None:
        stdin: Any = self._running[name].stdin
        stdin.write(text.encode())
        stdin.flush()

    def close_stdin(self, name: str) -> None:
        stdin: Any = self._running[name].stdin
        stdin.close()

    def ctrl_c(self, name: str) -> None:
        command = [sys.executable, str(_CTRL_C), str(self._running[name].pid)]
        subprocess.run(command, check=True, creationflags=_DETACHED)

    def terminate(self, pid: int) -> None:
        psutil.Process(pid).kill()  # TerminateProcess

    def processes(self) -> list[list[object]]:
        """Those of llamasup: its commands, servers and guardians."""
        found = []
        for process in psutil.process_iter():
            words = _argv(process)
            if not _OURS.isdisjoint(_names(words)):
                found.append([process.pid, words])
        return found

    def servers(self, pid: int) -> list[int]:
        """The llama-servers below ``pid``. A bundle becomes one by the argument ``embedded``."""
        children = psutil.Process(pid).children()
        return [child.pid for child in children if not _SERVERS.isdisjoint(_names(_argv(child)))]

    def open(self, path: str) -> None:
        """As programs do that do not let others rename or remove it."""
        self._files.append(open(path, "rb"))  # noqa: SIM115, PTH123 - stays open

    def close_files(self) -> None:
        while self._files:
            self._files.pop().close()

    def rights(self, path: str) -> list[list[str]]:
        """The names of this user in access control lists, and those that the list of ``path`` has."""
        module = vars(importlib.import_module("llamasup.core.system.native.windows_acl"))
        user = module["_user_sid"]()
        return [
            [user, module["_in_sddl"](user)],
            sorted(module["users_with_rights"](module["_sddl_of"](path))),
        ]

    def _follow(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        readers = [
            threading.Thread(target=self._read, args=(name, stream, pipe), daemon=True)
            for stream, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self._say("exit", name, popen.wait())

    def _read(self, name: str, stream: str, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._say(stream, name, line.decode("utf-8", "replace").rstrip("\r\n"))

    def _say(self, *words: object) -> None:
        with self._write:
            print(json.dumps(words), flush=True)


_SERVERS = frozenset({"llama-server.exe", "llamasup.embedded", "embedded"})
_PARTS = frozenset({"exec_guardian.py", "console_stop.py"})
_OURS = frozenset({"llamasup", "llamasup.exe", "llama-server.exe", "llamasup.embedded"}) | _PARTS


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.Error, OSError):
        return []


def _names(argv: list[str]) -> list[str]:
    """Its words, of paths the last part."""
    return [word.rpartition("\\")[2] for word in argv]


if __name__ == "__main__":
    Session().serve()
