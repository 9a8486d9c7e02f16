"""Starts a child process, detects its exit, and kills it together with its descendants.

The module decides nothing about when to start, stop or kill. It guarantees:

- The child leads its own session, so Ctrl-C and a closing terminal do not reach it; the supervisor drains and
  stops it. Its standard input is empty; stdout and stderr share one pipe.
- On Linux it dies with the supervisor, even after SIGKILL (PR_SET_PDEATHSIG, set by ``exec_child.py``). The
  kernel sends that signal when the *thread* that forked ends: call ``spawn`` from the event loop's thread,
  never from a pool worker. On Windows a job object ends the child and its descendants with the supervisor.
- It is reaped exactly once. When it exits, the rest of its process group is killed *before* the reaping,
  which frees its PID for other processes.
- With a run folder, the child is recorded there and tagged (``sweep.py``). If the supervisor is killed,
  the guardian or the next start can end the child and its descendants.

Cost of ``exec_child.py`` from fork to running child, median of 100 on two cores (Python 3.11): 0.5 ms without
it, 6.5 ms with it, 8.8 ms if it imported ``os`` and ``ctypes``; ``setpriv --pdeathsig`` takes 1.2 ms but
misses a supervisor that died in between, and a shell that compares ``$PPID`` (1.7 ms) would run a text file
as a script instead of failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.core.system.native import native
from llamasup.core.system.own_command import own_command
from llamasup.core.system.process.child import Exit
from llamasup.core.system.process.platform import cannot_execute, find_executable
from llamasup.core.system.process.sweep import (
    end_descendants,
    forget_child,
    record_child,
    tag_environment,
)
from llamasup.errors import BrokenRuntime

if TYPE_CHECKING:
    from llamasup.core.system.native.kernel_objects import JobObject

# For llama-server's output while the log thread waits for a core. 1 MiB is the most that an unprivileged
# process may request (fs.pipe-max-size).
_PIPE_BYTES = 1 << 20


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    run_folder: Path | None = None,
    nice: int | None = None,
    ignores_sigpipe: bool = False,
) -> Child:
    """Start ``argv`` with exactly this environment and working folder; the caller owns the result.

    With ``run_folder`` the environment gets one more entry, the tag that identifies descendants. ``nice`` is
    ignored where there are no nice values (Windows). ``ignores_sigpipe``: for a program that would end when a
    client disconnects.

    A relative ``argv[0]`` starts at the supervisor's working folder, a bare name is searched in ``env``'s
    PATH. Raises BrokenRuntime if it cannot be executed. On Linux an executable of another machine's format
    shows later: the child then exits with 126 or 127 and prints the reason, which ``diagnose`` understands.
    Waiting for it here would stop the event loop for 6 ms.
    """
    path = find_executable(argv[0], env)
    command = native.tied(path, argv, lambda: own_command("exec_child"), ignores_sigpipe=ignores_sigpipe)
    env = dict(env) if run_folder is None else tag_environment(env, run_folder)
    read_fd, write_fd = os.pipe()
    try:
        native.enlarge(write_fd, _PIPE_BYTES)
        popen, job = native.start_in_job(
            lambda flags: subprocess.Popen(
                command,
                executable=path if command[0] == argv[0] else None,
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=subprocess.STDOUT,
                close_fds=True,
                cwd=cwd,
                env=env,
                start_new_session=True,
                restore_signals=not ignores_sigpipe,  # Python itself ignores it
                creationflags=flags,
            )
        )
    except OSError as error:
        os.close(read_fd)
        if not cwd.is_dir():
            raise BrokenRuntime(
                f"The working folder {str(cwd)!r} of {argv[0]!r} is missing.", remedy="Create the folder."
            ) from error
        raise cannot_execute(path, error.strerror or str(error)) from error
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    native.restore_files_limit(popen.pid)  # exec_child.py needs milliseconds to become the child
    if nice is not None:
        native.set_niceness(popen.pid, nice)
    child = Child(popen, read_fd, job)
    if run_folder is not None:
        child.record(run_folder, path, env)
    return child


class Child:
    """A running child and its exit. Owned by the thread (and event loop) that spawned it.

    ``output_fd`` is the read end of the pipe that carries stdout and stderr; the caller closes it.
    """

    def __init__(self, popen: subprocess.Popen[bytes], output_fd: int, job: JobObject | None = None) -> None:
        self.pid = popen.pid
        self.output_fd = output_fd
        self.exit: Exit | None = None
        self._popen = popen  # without the reference Popen would reap the child itself
        self._waiters: set[asyncio.Future[Exit]] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfd = native.pidfd(self.pid)
        self._job = job
        self._run_folder: Path | None = None
        self._env: Mapping[str, str] = {}

    def record(self, run_folder: Path, executable: str, env: Mapping[str, str]) -> None:
        """Record this child in ``run_folder`` until it is reaped; ``env`` has its tag."""
        self._run_folder, self._env = run_folder, env
        record_child(run_folder, self.pid, executable)

    def end_descendants(self) -> tuple[int, ...]:
        """After the exit: kill descendants outside its process group, and wait. Blocks; for a thread.

        Returns their PIDs. Finds none without a run folder, and on Windows, where the job has ended them.
        """
        return tuple(process.pid for process in end_descendants(self._env))

    async def wait(self) -> Exit:
        """Wait for the child's exit. May be cancelled, repeated, and awaited by several tasks."""
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
        """Return the exit of the child, which is reaped then; None while it runs. Does not wait."""
        if self.exit is None and native.has_exited(self._popen):
            self._reap()
        return self.exit

    def terminate(self) -> None:
        """Ask it to stop: SIGTERM, on Windows Ctrl-C. Does nothing after the exit."""
        if self.exit is None:
            native.terminate(self._popen)

    def kill_group(self) -> None:
        """Send SIGKILL to the child's process group.

        Until the child is reaped, the group's number cannot be reused. Does nothing after the reaping, which
        has killed the rest of the group.
        """
        if self.exit is None:
            self._kill_group()

    def _kill_group(self) -> None:
        if self._job is not None:
            self._job.kill()
        else:
            native.kill_group(self._popen)

    def _on_exit(self) -> None:
        if self.exit is None and not native.sees_without_reaping:
            self._kill_group()  # `poll` is about to reap it
        # The loop may report an exit twice in the same round.
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
        """Start a thread that waits for the exit (without a pidfd) and leaves the reaping to the loop."""
        self._loop = loop
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name=f"wait-{self.pid}", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        native.wait_until_exited(self._popen)
        with contextlib.suppress(RuntimeError):  # the loop is closed: `poll` will find the exit
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._on_exit)


# --- the exit of a child -------------------------------------------------------------------------


def _reap(popen: subprocess.Popen[bytes]) -> Exit:
    """The exit status of a child that has exited."""
    if native.sees_without_reaping:
        try:
            popen.returncode = os.waitstatus_to_exitcode(os.waitpid(popen.pid, 0)[1])
        except ChildProcessError:
            # Our parent ignores SIGCHLD, so the kernel has reaped it. 255 like asyncio.
            popen.returncode = 255
    code = popen.returncode
    return Exit(code=code, signal=None) if code >= 0 else Exit(code=None, signal=_signal_name(-code))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        return f"SIG{number}"
