"""Sends Ctrl-C to all processes of the console of one process (Windows).

Run as ``python -I -S console_stop.py PID`` (``own_command.py``), and never imported by the supervisor.
"""

import ctypes
import sys


def main() -> None:
    kernel32 = ctypes.CDLL("kernel32")
    kernel32.FreeConsole()
    if kernel32.AttachConsole(int(sys.argv[1])):
        kernel32.SetConsoleCtrlHandler(None, True)  # it also reaches this process
        kernel32.GenerateConsoleCtrlEvent(0, 0)


if __name__ == "__main__":
    main()
