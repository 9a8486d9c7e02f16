"""Waits for the end of the supervisor, and cleans up if it was killed (Windows).

Run as ``python -I -S exec_guardian_windows.py FOLDER PROGRAM [ARG…]`` (``own_command.py``): see
``exec_guardian.py``. It is detached from the console, whose close and Ctrl-C do not reach it.
"""

import nt
import sys

assert sys.platform == "win32"


def main() -> None:
    folder, *command = sys.argv[1:]
    while nt.read(0, 1):
        pass
    try:
        nt.stat(folder)
    except FileNotFoundError:
        return
    import subprocess  # only now: the wait is to cost little memory

    subprocess.run(command, creationflags=subprocess.CREATE_NO_WINDOW, check=False)


if __name__ == "__main__":
    main()
