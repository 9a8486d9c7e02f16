"""Waits for the end of the supervisor, and cleans up if it was killed.

Run as ``python -I -S exec_guardian.py FOLDER PROGRAM [ARG…]`` (``own_command.py``) with a pipe as standard
input, and never imported by the supervisor. The supervisor holds the other end of the pipe, writes nothing,
and closes it when it ends in any way. If the folder then still exists, the supervisor did not clean up, and
PROGRAM does.

The guardian has its own session and no parent, so a signal to the supervisor's group, terminal or process
tree does not reach it; on Windows it is detached from the console, whose close and Ctrl-C do not reach it.
Waiting costs 3 MB (in the bundle 6.5 MB) and no CPU time; more imports would cost more.
"""

import sys

if sys.platform == "win32":
    import nt as system

    def detach() -> None:
        """Do nothing: the supervisor has started it detached."""

    def become(command: list[str]) -> None:
        import subprocess  # only now: the wait is to cost little memory

        subprocess.run(command, creationflags=subprocess.CREATE_NO_WINDOW, check=False)

else:
    import posix as system

    def detach() -> None:
        """Leave the session and the parent, which waits for the exit of the first process."""
        system.setsid()
        # Readers of the supervisor's output must see its end, not ours.
        nowhere = system.open("/dev/null", system.O_RDWR)
        for stream in (1, 2):
            system.dup2(nowhere, stream)
        if system.fork() != 0:
            system._exit(0)

    def become(command: list[str]) -> None:
        system.execve(command[0], command, system.environ)


def main() -> None:
    folder, *command = sys.argv[1:]
    detach()
    while system.read(0, 1):
        pass
    try:
        system.stat(folder)
    except FileNotFoundError:
        return
    become(command)


if __name__ == "__main__":
    main()
