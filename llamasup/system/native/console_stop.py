"""Sends Ctrl-C to all processes of the console of one process (Windows).

Run as ``python -I -S console_stop.py PID`` and never imported.
"""

import ctypes
import sys


def main(kernel32: ctypes.CDLL) -> None:
    kernel32.FreeConsole()
    if kernel32.AttachConsole(int(sys.argv[1])):
        kernel32.SetConsoleCtrlHandler(None, True)  # it reaches this process, too
        kernel32.GenerateConsoleCtrlEvent(0, 0)


if __name__ == "__main__":
    main(ctypes.CDLL("kernel32"))
