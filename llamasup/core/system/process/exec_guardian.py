"""Waits for the end of the supervisor, and cleans up if it was killed (Linux, macOS).

Run as ``python -I -S exec_guardian.py FOLDER PROGRAM [ARG…]`` (``own_command.py``) with a pipe as standard
input, and never imported by the supervisor. The supervisor holds the other end of the pipe, writes nothing,
and closes it when it ends in any way. If the folder then still exists, the supervisor did not clean up, and
PROGRAM does.

The guardian has its own session and no parent, so a signal to the supervisor's group, terminal or process
tree does not reach it. Waiting costs 3 MB (in the bundle 6.5 MB) and no CPU time; more imports would
cost more.
"""

import posix
import sys

assert sys.platform != "win32"


def main() -> None:
    folder, *command = sys.argv[1:]
    posix.setsid()
    # Readers of the supervisor's output must see its end, not ours.
    nowhere = posix.open("/dev/null", posix.O_RDWR)
    for stream in (1, 2):
        posix.dup2(nowhere, stream)
    if posix.fork() != 0:
        posix._exit(0)  # the supervisor waits for this exit
    while posix.read(0, 1):
        pass
    try:
        posix.stat(folder)
    except FileNotFoundError:
        return
    posix.execve(command[0], command, posix.environ)


if __name__ == "__main__":
    main()
