"""Asks the kernel to kill this process with its supervisor (Linux), and then becomes the child.

Run as ``python -I -S exec_child.py SUPERVISOR_PID IGNORED PATH ARGV0 [ARG…]`` (``own_command.py``), and never
imported by the supervisor. IGNORED is the number of a signal that the child ignores, or 0. A ``preexec_fn``
would do the same inside ``fork``, where it can deadlock if other threads run. It imports only modules that
are built into the interpreter: ``os``, ``signal`` and ``ctypes`` would add 4 ms to its 6 ms (measured, see
spawn.py).
"""

import _ctypes
import _signal  # type: ignore[import-not-found]
import posix
import sys

assert sys.platform == "linux"

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# As in a shell: 126 cannot be executed, 127 not found.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
ENOENT, ENOTDIR = 2, 20


def main() -> None:
    supervisor, ignored, path, *argv = sys.argv[1:]
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, posix.RTLD_NOW), "prctl")  # type: ignore[arg-type]
    _ctypes.call_function(prctl, (PR_SET_PDEATHSIG, int(_signal.SIGKILL), 0, 0, 0))
    # A supervisor that died before the prctl sends no signal. Compare with its PID, not with 1: in a
    # container or under `systemd --user` a subreaper adopts orphans.
    if posix.getppid() != int(supervisor):
        posix._exit(1)
    # Python ignores SIGPIPE and SIGXFSZ, a caller may ignore or block more, and exec keeps these settings.
    for number in _signal.valid_signals():
        if _signal.getsignal(number) == _signal.SIG_IGN and number != int(ignored):
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    try:
        posix.execve(path, argv, given_environment())
    except OSError as error:
        report = f"llamasup: cannot execute {path}: {error.strerror}\n"
        posix.write(2, report.encode("utf-8", "surrogateescape"))
        posix._exit(NOT_FOUND if error.errno in (ENOENT, ENOTDIR) else NOT_EXECUTABLE)


def given_environment() -> dict[bytes, bytes]:
    """Return the environment without Python's changes: in a C locale it adds LC_CTYPE (PEP 538)."""
    if getattr(sys, "frozen", False):
        import os  # imported already: llamasup.frozen has taken back the changes of the start program

        return dict(os.environb)
    try:
        with open("/proc/self/environ", "rb") as environ:  # noqa: PTH123 - pathlib costs 5 ms
            entries = environ.read().split(b"\0")
    except OSError:  # no /proc: with LC_CTYPE
        return dict(posix.environ)
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


if __name__ == "__main__":
    main()
