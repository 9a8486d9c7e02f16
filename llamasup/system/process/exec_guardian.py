"""Outlives a supervisor that was killed, for as long as it takes to clean up after it (Linux, macOS).

Run as ``python -I -S exec_guardian.py FOLDER PROGRAM [ARG…]`` with a pipe as standard input, and never
imported. Nobody writes into that pipe: its other end closes with the supervisor, however that ends. A folder
that is still there then means that it ended without cleaning up, and PROGRAM does that in its place.

It waits as a process of its own session without a parent of ours, so that what ends the supervisor's group,
terminal or tree of processes does not end it. Waiting costs 3 MB and no time: no more modules than these.
"""

import posix
import sys


def main() -> None:
    folder, *command = sys.argv[1:]
    posix.setsid()
    # Whoever reads what the supervisor wrote waits for its end, not for ours.
    nowhere = posix.open("/dev/null", posix.O_RDWR)
    for stream in (1, 2):
        posix.dup2(nowhere, stream)
    if posix.fork() != 0:
        posix._exit(0)  # whoever started us waits for this, and knows that all of the above is done
    while posix.read(0, 1):
        pass
    try:
        posix.stat(folder)
    except FileNotFoundError:
        return
    posix.execve(command[0], command, posix.environ)


if __name__ == "__main__":
    main()
