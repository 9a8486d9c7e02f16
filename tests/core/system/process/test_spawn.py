"""Real children, with their state as the kernel reports it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from llamasup.core.llama_server.diagnosis import diagnose
from llamasup.core.system.native import native
from llamasup.core.system.process import spawn as spawn_module
from llamasup.core.system.process.child import Exit
from llamasup.core.system.process.spawn import Child, spawn
from llamasup.errors import BrokenRuntime
from tests.kit.paths import ROOT

ENV = {"PATH": os.defpath}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    runner: Run = request.param
    return runner


@pytest.fixture(params=["pidfd", "thread"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of seeing the end: pidfd, and the thread of systems without it."""
    if request.param == "thread":
        monkeypatch.setattr(native, "pidfd", lambda pid: None)
    return str(request.param)


@contextlib.contextmanager
def spawned(*argv: str, env: Mapping[str, str] = ENV, cwd: Path = Path("/")) -> Iterator[Child]:
    child = spawn(argv, env=env, cwd=cwd)
    try:
        yield child
    finally:
        child.kill_group()
        if child.exit is None:
            asyncio.run(child.wait())
        os.close(child.output_fd)


def sh(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


def read_line(child: Child) -> str:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(child.output_fd, 1)):
        line += byte
    return line.decode().strip()


def read_all(child: Child) -> str:
    """Everything up to the end of the output; that is, until no process holds the pipe."""
    chunks = []
    while chunk := os.read(child.output_fd, 65536):
        chunks.append(chunk)
    return b"".join(chunks).decode()


def is_gone(pid: int) -> bool:
    """The pipe's last writer closes it a moment before it is gone: then a zombie, or nothing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
    return True


def autogroup_of(pid: int) -> int | None:
    """The nice value of the session; None if the kernel has no autogroup."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except FileNotFoundError:
        return None


@pytest.mark.skipif(sys.platform == "win32", reason="no nice values")
@pytest.mark.parametrize("nice", [None, 0, 7])
def test_child_has_the_nice_value_in_its_own_session(run: Run, tmp_path: Path, nice: int | None) -> None:
    async def test() -> None:
        child = spawn(["sleep", "60"], env=ENV, cwd=tmp_path, nice=nice)
        try:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == (own if nice is None else nice)
            assert autogroup_of(child.pid) in (None, nice or 0)
        finally:
            child.kill_group()
            await child.wait()
            os.close(child.output_fd)

    run(test())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a nice value is that of a process")
def test_threads_that_a_child_already_has_get_the_nice_value() -> None:
    program = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        threads = [thread.id for thread in psutil.Process(child.pid).threads()]
        native.set_niceness(child.pid, 7)
        assert [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [7, 7]
        child.communicate(b"\n")


# --- the end ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("exit 0", Exit(0, None)),
        ("exit 3", Exit(3, None)),
        ("kill -KILL $$", Exit(None, "SIGKILL")),
        ("kill -SEGV $$", Exit(None, "SIGSEGV")),
        ("kill -40 $$", Exit(None, "SIG40")),
    ],
)
def test_exit_status_is_returned_and_the_child_reaped(run: Run, script: str, end: Exit) -> None:
    with spawned(*sh(script)) as child:
        assert run(child.wait()) == end
        assert not psutil.pid_exists(child.pid)


@pytest.mark.both_loops
@pytest.mark.usefixtures("way")
def test_wait_can_be_cancelled_and_repeated(run: Run) -> None:
    async def scenario(child: Child) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await child.wait()
        first, second = asyncio.ensure_future(child.wait()), asyncio.ensure_future(child.wait())  # noqa: TID251
        await asyncio.sleep(0)
        first.cancel()
        child.kill_group()
        assert await second == await child.wait() == Exit(None, "SIGKILL")

    with spawned("sleep", "60") as child:
        run(scenario(child))


@pytest.mark.usefixtures("way")
def test_wait_can_continue_in_another_event_loop(run: Run) -> None:
    async def give_up(child: Child) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.wait(), 0.05)

    async def kill_and_wait(child: Child) -> Exit:
        waiting = asyncio.ensure_future(child.wait())  # noqa: TID251
        await asyncio.sleep(0)
        child.kill_group()
        return await waiting

    with spawned("sleep", "60") as child:
        run(give_up(child))
        assert run(kill_and_wait(child)) == Exit(None, "SIGKILL")


def test_poll_reaps_an_exited_child_and_wakes_waiters(run: Run) -> None:
    async def scenario(child: Child) -> None:
        assert child.poll() is None
        waiting = asyncio.ensure_future(child.wait())  # noqa: TID251
        await asyncio.sleep(0)
        child.kill_group()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it has been killed
        assert child.poll() == Exit(None, "SIGKILL")
        assert await waiting == child.poll()

    with spawned("sleep", "60") as child:
        run(scenario(child))


def test_child_reaped_by_the_kernel_has_exited(run: Run) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with spawned(*sh("exit 3")) as child:
            assert run(child.wait()) == Exit(255, None)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.extended
@pytest.mark.usefixtures("way")
def test_a_hundred_children_leave_no_descriptor_and_no_thread(run: Run) -> None:
    def count() -> tuple[int, int]:
        waiting = [thread for thread in threading.enumerate() if thread.name.startswith("wait-")]
        for thread in waiting:
            thread.join()
        return psutil.Process().num_fds(), threading.active_count()

    async def lives(number: int) -> None:
        for _ in range(number):
            child = spawn(("/bin/true",), env=ENV, cwd=Path("/"))
            await child.wait()
            os.close(child.output_fd)

    run(lives(2))
    before = count()
    run(lives(100))
    assert count() == before


# --- signals and groups ----------------------------------------------------------------------------


def test_terminate_signals_only_the_child(run: Run) -> None:
    with spawned(*sh("trap 'echo asked; exit 7' TERM; echo up; while :; do sleep 0.01; done")) as child:
        assert read_line(child) == "up"
        child.terminate()
        assert run(child.wait()) == Exit(7, None)
        assert "asked" in read_all(child)
        child.terminate()  # it has exited


def test_kill_group_takes_child_and_grandchild(run: Run) -> None:
    with spawned(*sh("trap '' TERM; sleep 600 & echo $!; wait")) as child:
        grandchild = int(read_line(child))
        child.kill_group()
        assert run(child.wait()) == Exit(None, "SIGKILL")
        assert read_all(child) == ""  # the pipe has no writer left
        assert is_gone(grandchild)


@pytest.mark.usefixtures("way")
def test_rest_of_the_group_dies_with_the_child(run: Run) -> None:
    with spawned(*sh("sleep 600 & echo $!")) as child:
        grandchild = int(read_line(child))
        assert run(child.wait()) == Exit(0, None)
        assert read_all(child) == ""
        assert is_gone(grandchild)


def test_no_signal_is_sent_after_the_exit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with spawned("/bin/true") as child:
        run(child.wait())

        def never(*args: object) -> None:
            pytest.fail(f"signalled {args}, which may be another process by now")

        monkeypatch.setattr(os, "kill", never)
        monkeypatch.setattr(os, "killpg", never)
        child.terminate()
        child.kill_group()


# --- what the child is born into -------------------------------------------------------------------

_REPORT = (
    "import os,sys,signal;print(os.getpid()==os.getsid(0)==os.getpgid(0),sys.stdin.read()=='',end=' ')\n"
)


def test_the_child_leads_its_own_session_and_reads_nothing(run: Run) -> None:
    with spawned(sys.executable, "-c", _REPORT) as child:
        assert run(child.wait()) == Exit(0, None)
        assert read_all(child) == "True True "


def test_the_child_has_exactly_the_environment_and_folder_that_it_was_given(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    env = {"GREETING": "zwölf = 12\n", "EMPTY": ""}
    with spawned("/usr/bin/env", "-0", env=env, cwd=folder) as child:
        run(child.wait())
        assert read_all(child) == "GREETING=zwölf = 12\n\0EMPTY=\0"
    with spawned("/bin/pwd", env={}, cwd=folder) as child:
        run(child.wait())
        assert read_all(child) == f"{folder}\n"


def test_arguments_arrive_as_they_are(run: Run) -> None:
    strange = ("", "a b", "--", "-I", "'\"$(id)", "ünï", os.fsdecode(b"\xff\xfe"), "*")
    with spawned(
        sys.executable, "-c", "import sys,os;print(*map(os.fsencode,sys.argv[1:]))", *strange
    ) as child:
        run(child.wait())
        assert read_all(child).strip() == " ".join(repr(os.fsencode(one)) for one in strange)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_child_starts_with_default_signals_and_no_inherited_descriptors(run: Run) -> None:
    inherited = os.open("/", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with spawned(*sh("grep -E 'Sig(Ign|Blk)' /proc/self/status; ls /proc/self/fd")) as child:
            run(child.wait())
            lines = read_all(child).split()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGTERM, before)
        os.close(inherited)
    assert lines[:4] == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]
    assert lines[4:] == ["0", "1", "2", "3"]  # 3 is the folder that ls reads


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_child_ignores_sigpipe_only_on_request(is_frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)  # frozen: without exec_child.py
    shown = []
    for ignores in (False, True):
        child = spawn(sh("grep SigIgn /proc/self/status"), env=ENV, cwd=Path("/"), ignores_sigpipe=ignores)
        asyncio.run(child.wait())
        shown.append(int(read_all(child).split()[1], 16))
        os.close(child.output_fd)
    sigpipe = 1 << (signal.SIGPIPE - 1)
    assert [bool(mask & sigpipe) for mask in shown] == [False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("helper", ["exec_child", "setpriv"])
def test_the_child_dies_with_a_supervisor_that_is_killed(helper: str) -> None:
    supervisor = (
        "import sys,time,os;from pathlib import Path;from llamasup.core.system.process.spawn import spawn\n"
        f"sys.frozen = {helper == 'setpriv'}\n"
        "child = spawn(('sleep','600'), env={'PATH':os.defpath}, cwd=Path('/'))\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    root = ROOT
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, cwd=root) as popen:
        assert popen.stdout is not None
        child = psutil.Process(int(popen.stdout.readline()))
        while child.name() != "sleep":  # until the helper has become the child
            child.status()
        popen.kill()
    assert is_gone(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the helper is Linux's")
def test_child_does_not_start_if_the_supervisor_died_before(tmp_path: Path) -> None:
    proof = tmp_path / "started"
    somebody_else = "1"
    helper = Path(spawn_module.__file__).with_name("exec_child.py")
    words = [somebody_else, "0", "/usr/bin/touch", "touch", str(proof)]
    argv = [sys.executable, "-I", "-S", str(helper), *words]
    assert subprocess.run(argv, check=False).returncode == 1
    assert not proof.exists()


# --- what cannot be executed -----------------------------------------------------------------------


def test_missing_program_cannot_be_executed(tmp_path: Path) -> None:
    with pytest.raises(BrokenRuntime, match=r"No such file or directory"):
        spawn((str(tmp_path / "llama-server"),), env=ENV, cwd=tmp_path)
    with pytest.raises(BrokenRuntime, match=r"'no-such-llama-server': not found on PATH"):
        spawn(("no-such-llama-server",), env=ENV, cwd=tmp_path)


def test_folder_and_non_executable_file_cannot_be_executed(tmp_path: Path) -> None:
    plain = tmp_path / "llama-server"
    plain.write_text("")
    with pytest.raises(BrokenRuntime, match=r"Permission denied") as raised:
        spawn((str(plain),), env=ENV, cwd=tmp_path)
    assert raised.value.remedy == f"Make it executable: chmod +x {plain}"
    with pytest.raises(BrokenRuntime, match=r"Is a directory"):
        spawn((str(tmp_path),), env=ENV, cwd=tmp_path)


def test_a_missing_working_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenRuntime, match=r"working folder .*gone"):
        spawn(("/bin/true",), env=ENV, cwd=tmp_path / "gone")


def test_too_long_argument_list_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BrokenRuntime, match=r"Argument list too long"):
        spawn(("/bin/true", "x" * 4_000_000), env=ENV, cwd=tmp_path)


def test_a_failed_start_leaves_no_descriptor(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    for argv, cwd in ((("/bin/true", "x" * 4_000_000), tmp_path), (("/bin/true",), tmp_path / "gone")):
        with pytest.raises(BrokenRuntime):
            spawn(argv, env=ENV, cwd=cwd)
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("content", [b"not a program\n", b"\x7fELF\x02\x01\x01" + b"\0" * 57])
def test_file_of_another_format_is_a_broken_runtime(run: Run, tmp_path: Path, content: bytes) -> None:
    program = tmp_path / "llama-server"
    program.write_bytes(content)
    program.chmod(0o755)
    with spawned(str(program)) as child:
        end = run(child.wait())
        diagnosis = diagnose(end, read_all(child).splitlines(), phase="starting")
    assert (end, diagnosis.cause, diagnosis.exit_code) == (Exit(126, None), "runtime_broken", 69)
    assert diagnosis.message == f"Cannot execute {str(program)!r}: Exec format error."


def test_a_script_whose_interpreter_is_missing_ends_as_a_broken_runtime(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with spawned(str(program)) as child:
        end = run(child.wait())
        diagnosis = diagnose(end, read_all(child).splitlines(), phase="starting")
    assert (end, diagnosis.cause) == (Exit(127, None), "runtime_broken")


def test_relative_path_starts_at_the_supervisors_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "server").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with spawned("./server", cwd=Path("/")) as child:
        run(child.wait())
        assert read_all(child) == "/\n"
