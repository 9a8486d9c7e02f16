"""Starts a child process, notices its end, and ends it together with everything it has started.

No policy: when to start, stop or kill is decided elsewhere. What this module guarantees:

- The child leads its own session, so that neither Ctrl-C nor the closing of the terminal reaches it: it is
  the supervisor that drains and then stops it. Its standard input is empty; stdout and stderr are one pipe.
- On Linux it dies with the supervisor, SIGKILL included (PR_SET_PDEATHSIG, set by ``exec_child.py``). The
  kernel sends that signal when the *thread* that forked ends: call ``spawn`` from the thread that runs the
  event loop, never from a worker of a pool. On Windows it and its descendants are in a job object that ends
  with the supervisor.
- It is reaped exactly once. When it ends, what is left of its process group is killed *before* it is
  reaped: from then on its number may belong to anybody.
- Given a run folder, it is written down there and marked (``belongings.py``), so that somebody else can end
  it and its descendants: the guardian or the next start, when the supervisor was killed.

What the helper costs, fork to running child, median of 100 on two cores (Python 3.11): 0.5 ms without,
6.5 ms with it as it is, 8.8 ms had it imported ``os`` and ``ctypes``; ``setpriv --pdeathsig`` takes 1.2 ms
but cannot notice a supervisor that died in between, and a shell that compares ``$PPID`` for it (1.7 ms) would
run a text file as a script instead of failing.

Linux is run and tested. The ways for macOS (kqueue) and Windows (job object) are written to their
documentation and tested with fakes of the system's calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.errors import BrokenRuntime
from llamasup.system.process.exit import Exit
from llamasup.system.process.exit_watch import end_of
from llamasup.system.process.limits import give_back_limit
from llamasup.system.process.ownership import end_descendants, forget_child, record_child, tag_environment
from llamasup.system.process.platform import broken, find_executable, python_executable

if TYPE_CHECKING:
    from llamasup.system.process.windows import Job

__all__ = ["Child", "spawn"]

_EXEC_CHILD = Path(__file__).with_name("exec_child.py")
# Room for what llama-server writes while the log thread waits for a core. The most that an unprivileged
# process may ask for is 1 MiB (fs.pipe-max-size).
_PIPE_BYTES = 1 << 20


def spawn(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, run_folder: Path | None = None) -> Child:
    """Start ``argv`` with exactly this environment and working folder; the caller owns the result.

    With ``run_folder`` the environment has one entry more, the mark by which descendants are known.

    A relative ``argv[0]`` is meant from the supervisor's working folder, a bare name from ``env``'s PATH.
    Raises BrokenRuntime when it cannot be executed. On Linux the last doubt (a file of another machine's
    format) shows only later: the child then ends with 126 or 127 and says why in its output, which
    ``diagnose`` understands. Waiting for it here would stop the event loop for the helper's 6 ms.
    """
    path = find_executable(argv[0], env)
    command = _guarded(path, argv)
    env = dict(env) if run_folder is None else tag_environment(env, run_folder)
    read_fd, write_fd = os.pipe()
    try:
        _enlarge(write_fd)
        popen = subprocess.Popen(
            command,
            executable=path if command[0] == argv[0] else None,
            stdin=subprocess.DEVNULL,
            stdout=write_fd,
            stderr=subprocess.STDOUT,
            close_fds=True,
            cwd=cwd,
            env=env,
            start_new_session=True,
            creationflags=_creation_flags(),
        )
    except OSError as error:
        os.close(read_fd)
        if not cwd.is_dir():
            raise BrokenRuntime(
                f"The working folder {str(cwd)!r} of {argv[0]!r} is missing.", remedy="Create the folder."
            ) from error
        raise broken(path, error.strerror or str(error)) from error
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    give_back_limit(popen.pid)  # the helper below it needs milliseconds to become the child
    child = Child(popen, read_fd, _job(popen))
    if run_folder is not None:
        child.write_down(run_folder, path, env)
    return child


class Child:
    """A running child and its end. Owned by the thread (and event loop) that spawned it.

    ``output_fd`` is the read end of the pipe that carries stdout and stderr; whoever takes it closes it.
    """

    def __init__(self, popen: subprocess.Popen[bytes], output_fd: int, job: Job | None = None) -> None:
        self.pid = popen.pid
        self.output_fd = output_fd
        self.exit: Exit | None = None
        self._popen = popen  # kept: Popen would reap a child whose Popen object is gone
        self._waiters: set[asyncio.Future[Exit]] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfd = _pidfd(self.pid)
        self._job = job
        self._run_folder: Path | None = None
        self._env: Mapping[str, str] = {}

    def write_down(self, run_folder: Path, executable: str, env: Mapping[str, str]) -> None:
        """Leave word of this child in ``run_folder`` until it is reaped; ``env`` carries its mark."""
        self._run_folder, self._env = run_folder, env
        record_child(run_folder, self.pid, executable)

    def end_descendants(self) -> tuple[int, ...]:
        """After the end: kill what it left outside its process group, and wait. Blocks; for a thread.

        Returns their numbers. Finds nothing without a run folder, and outside Linux.
        """
        return tuple(each.pid for each in end_descendants(self._env))

    async def wait(self) -> Exit:
        """Wait for the end of the child. May be cancelled, repeated, and awaited by several tasks."""
        if self.exit is not None:
            return self.exit
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Exit] = loop.create_future()
        if self._pidfd is None:
            self._start_thread(loop)
        elif not self._waiters:
            loop.add_reader(self._pidfd, self._on_exit)
        self._waiters.add(future)
        try:
            return await future
        finally:
            self._waiters.discard(future)
            if not self._waiters and self._pidfd is not None:
                loop.remove_reader(self._pidfd)

    def poll(self) -> Exit | None:
        """The end of the child if it has come; reaps it then. Does not wait."""
        if self.exit is None and _has_exited(self._popen):
            self._reap()
        return self.exit

    def terminate(self) -> None:
        """Ask the child to stop (SIGTERM). Nothing happens when it has ended."""
        if self.exit is None:
            with contextlib.suppress(ProcessLookupError):  # SIGCHLD ignored: the kernel has reaped it
                self._popen.terminate() if sys.platform == "win32" else os.kill(self.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the child and all of its process group (SIGKILL), at once.

        Until the child is reaped the group's number cannot belong to anybody else; reaping has already
        killed what the child left behind, so that afterwards there is nothing to do.
        """
        if self.exit is None:
            self._kill_group()

    def _kill_group(self) -> None:
        if self._job is not None:
            self._job.kill()
        elif sys.platform == "win32":
            self._popen.kill()
        else:
            # EPERM: only zombies are left (macOS), or a member has changed its user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _on_exit(self) -> None:
        if self.exit is None and not _SEES_WITHOUT_REAPING:
            self._kill_group()  # its end has been seen, and `poll` is about to reap it
        # The loop may report once more what has been dealt with in the same round.
        if self.poll() is not None:
            self._wake()

    def _reap(self) -> None:
        self._kill_group()
        self.exit = _reap(self._popen)
        if self._job is not None:
            self._job.close()
        if self._run_folder is not None:
            forget_child(self._run_folder, self.pid)
        waiters = list(self._waiters)
        if self._pidfd is not None:
            for future in waiters[:1]:
                future.get_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._wake()

    def _wake(self) -> None:
        assert self.exit is not None
        for future in self._waiters:
            if not future.done():
                future.set_result(self.exit)

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Where there is no pidfd: a thread that sees the end and leaves the reaping to the loop."""
        self._loop = loop
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name=f"wait-{self.pid}", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        _wait_until_exited(self._popen)
        with contextlib.suppress(RuntimeError):  # the loop is closed: `poll` will find the end
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._on_exit)


# --- the end of a child --------------------------------------------------------------------------

# Without waitid (macOS before Python 3.13, Windows) the end is seen by kqueue or a handle. A `poll` that
# comes before that sees and reaps in one step; the group is then killed just after it.
_SEES_WITHOUT_REAPING = hasattr(os, "waitid")


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable at the end of ``pid``; None before Linux 5.3 and elsewhere."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # ENOSYS, or a seccomp filter (old container runtimes answer EPERM)
        return None


def _has_exited(popen: subprocess.Popen[bytes]) -> bool:
    if not _SEES_WITHOUT_REAPING:
        return popen.poll() is not None
    try:
        return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _wait_until_exited(popen: subprocess.Popen[bytes]) -> None:
    if not _SEES_WITHOUT_REAPING:
        with contextlib.suppress(OSError):  # it has ended: there is nothing to wait for
            end_of(popen.pid).wait()
        return
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)


def _reap(popen: subprocess.Popen[bytes]) -> Exit:
    """Take the status of a child that has ended."""
    if _SEES_WITHOUT_REAPING:
        try:
            popen.returncode = os.waitstatus_to_exitcode(os.waitpid(popen.pid, 0)[1])
        except ChildProcessError:
            # Whoever started us ignores SIGCHLD, so the kernel reaps and forgets. 255 as asyncio has it.
            popen.returncode = 255
    code = popen.returncode
    return Exit(code=code, signal=None) if code >= 0 else Exit(code=None, signal=_signal_name(-code))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        return f"SIG{number}"


# --- the start of a child ------------------------------------------------------------------------


def _guarded(path: str, argv: Sequence[str]) -> list[str]:
    """The command that runs ``argv`` tied to the life of this process, where the system can do that."""
    if sys.platform != "linux":
        return list(argv)
    if (python := python_executable()) is not None:
        return [python, "-I", "-S", str(_EXEC_CHILD), str(os.getpid()), path, *argv]
    # util-linux can do it, less the race.
    setpriv = shutil.which("setpriv", path=os.defpath)
    return list(argv) if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--", path, *argv[1:]]


def _enlarge(pipe_fd: int) -> None:
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # beyond the user's quota for pipes: the default 64 KiB does
            fcntl.fcntl(pipe_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _job(popen: subprocess.Popen[bytes]) -> Job | None:
    """What ties the child's life to ours where there is neither PDEATHSIG nor a guardian: Windows."""
    if sys.platform == "win32":
        from llamasup.system.process.windows import Job

        job = Job()
        with contextlib.suppress(OSError):  # it has ended already
            job.adopt(int(popen._handle))
        return job
    return None


def _creation_flags() -> int:
    if sys.platform == "win32":
        return subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
    return 0
