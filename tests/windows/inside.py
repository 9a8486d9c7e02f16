"""Runs in the Windows Python: answers questions about its processes, a line of JSON for each."""

import ctypes
import importlib
import json
import os
import subprocess
import sys

import psutil


def answer(question: str, *arguments: object) -> object:
    match question, arguments:
        case "processes", ():
            return [
                process.pid for process in psutil.process_iter() if "llamasup" in " ".join(_argv(process))
            ]
        case "servers", (pid,):
            children = psutil.Process(int(str(pid))).children()
            return [child.pid for child in children if "llamasup.embedded" in _argv(child)]
        case "is alive", (pid,):
            return psutil.pid_exists(int(str(pid)))
        case "terminate", (pid,):
            psutil.Process(int(str(pid))).kill()  # TerminateProcess
            return True
        case "start", argv:
            started.append(
                subprocess.Popen(
                    [sys.executable, *map(str, argv)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    creationflags=0x200,  # CREATE_NEW_PROCESS_GROUP: Ctrl-Break can be sent to it
                )
            )
            return started[-1].pid
        case "ctrl-break", ():
            os.kill(started[-1].pid, 1)  # CTRL_BREAK_EVENT
            return started[-1].wait(60)
        case "open", (path,):
            opened.append(open(str(path), "rb"))  # noqa: SIM115, PTH123 - stays open
            return True
        case "rights", (path,):
            module = importlib.import_module("llamasup.system.native.windows")
            return sorted(vars(module)["_users_with_rights"](str(path)))
        case _:
            raise ValueError(question)


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.Error, OSError):
        return []


started: list["subprocess.Popen[bytes]"] = []
opened: list[object] = []

if __name__ == "__main__":
    ctypes.CDLL("kernel32").SetConsoleCtrlHandler(None, True)  # Ctrl-Break is for the processes it starts
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)
