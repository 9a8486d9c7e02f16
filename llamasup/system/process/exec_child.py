"""Becomes the child, after asking the kernel to kill it with its supervisor (Linux).

Run as ``python -I -S exec_child.py SUPERVISOR_PID PATH ARGV0 [ARG…]`` and never imported by the supervisor.
A ``preexec_fn`` would do the same inside ``fork`` and can deadlock when other threads run; this is its own
program, so it cannot. Only modules that are already in the interpreter are used: ``os``, ``signal`` and
``ctypes`` would add 4 ms to the 6 ms that this costs (measured, see effects/process.py).
"""

import _ctypes
import _signal  # type: ignore[import-not-found]
import posix
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# What a shell reports, and what nobody else may mean: 126 cannot be executed, 127 not found.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
ENOENT, ENOTDIR = 2, 20


def main() -> None:
    supervisor, path, *argv = sys.argv[1:]
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, posix.RTLD_NOW), "prctl")  # type: ignore[arg-type]
    _ctypes.call_function(prctl, (PR_SET_PDEATHSIG, int(_signal.SIGKILL), 0, 0, 0))
    # A supervisor that died before the prctl sends no signal. Its number is compared, not 1: orphans of a
    # container or of `systemd --user` go to a subreaper.
    if posix.getppid() != int(supervisor):
        posix._exit(1)
    # Python ignores SIGPIPE and SIGXFSZ, a caller may ignore or block more, and exec keeps all that.
    for number in _signal.valid_signals():
        if _signal.getsignal(number) == _signal.SIG_IGN:
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    try:
        posix.execve(path, argv, given_environment())
    except OSError as error:
        report = f"llamasup: cannot execute {path}: {error.strerror}\n"
        posix.write(2, report.encode("utf-8", "surrogateescape"))
        posix._exit(NOT_FOUND if error.errno in (ENOENT, ENOTDIR) else NOT_EXECUTABLE)


def given_environment() -> dict[bytes, bytes]:
    """The environment as it was given: in a C locale Python adds LC_CTYPE to its own (PEP 538)."""
    try:
        with open("/proc/self/environ", "rb") as environ:  # noqa: PTH123 - pathlib costs 5 ms
            entries = environ.read().split(b"\0")
    except OSError:  # no /proc here: then with LC_CTYPE
        return dict(posix.environ)
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


if __name__ == "__main__":
    main()
