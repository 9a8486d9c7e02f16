"""The exit of a process that is not a child. Linux is real; macOS and Windows have fakes of their calls."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from llamasup.core.system.native import linux, native
from llamasup.core.system.native.kernel_objects import ExtendedLimits, HandleEnd, JobObject, started_in
from llamasup.core.system.native.macos import KqueueEnd

# --- Linux ---------------------------------------------------------------------------------------


@pytest.fixture(params=["pidfd", "polled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "polled":

        def refused(pid: int) -> int:
            raise PermissionError(pid)  # a seccomp filter

        monkeypatch.setattr(os, "pidfd_open", refused)
        monkeypatch.setattr(linux, "_POLL_S", 0.001)
    return str(request.param)


@pytest.mark.skipif(sys.platform != "linux", reason="the way of Linux")
@pytest.mark.usefixtures("way")
def test_exit_is_detected_whoever_reaps() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        wait = native.wait_for_exit(process.pid)
        seen = threading.Event()

        def watch() -> None:
            wait()
            seen.set()

        thread = threading.Thread(target=watch)
        thread.start()
        assert not seen.wait(0.02)
        process.kill()
        assert seen.wait(60)
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="the way of Linux")
@pytest.mark.usefixtures("way")
def test_exited_process_cannot_be_watched() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):  # a zombie
            native.wait_for_exit(process.pid)
        process.wait()
        with pytest.raises(ProcessLookupError):
            native.wait_for_exit(process.pid)


# --- macOS ---------------------------------------------------------------------------------------


class FakeKqueue:
    """select's kqueue for one process: knows ``living``, reports the ends in ``news``."""

    KQ_FILTER_PROC, KQ_EV_ADD, KQ_EV_ONESHOT, KQ_NOTE_EXIT = -5, 1, 16, 0x80000000

    def __init__(self, living: set[int]) -> None:
        self.living = living
        self.news: deque[list[Any]] = deque()
        self.watched: list[tuple[int, int, int, int]] = []
        self.closed = False

    def kqueue(self) -> FakeKqueue:
        return self

    def kevent(self, ident: int, *, filter: int, flags: int, fflags: int) -> SimpleNamespace:
        return SimpleNamespace(ident=ident, filter=filter, flags=flags, fflags=fflags)

    def control(self, changes: list[Any] | None, most: int, timeout: float | None = None) -> list[Any]:
        for change in changes or []:
            if change.ident not in self.living:
                raise ProcessLookupError(change.ident)
            self.watched.append((change.ident, change.filter, change.flags, change.fflags))
        return self.news.popleft() if most else []

    def close(self) -> None:
        self.closed = True


def test_kqueue_is_asked_for_the_exit_and_waits_until_it_comes() -> None:
    api = FakeKqueue({42})
    end = KqueueEnd(42, api)
    assert api.watched == [(42, api.KQ_FILTER_PROC, api.KQ_EV_ADD | api.KQ_EV_ONESHOT, api.KQ_NOTE_EXIT)]
    api.news.extend([[], ["the exit"]])  # woken for nothing, then for the exit
    end.wait()
    assert not api.news
    assert api.closed


def test_kqueue_does_not_find_an_exited_process() -> None:
    api = FakeKqueue(set())
    with pytest.raises(ProcessLookupError):
        KqueueEnd(42, api)
    assert api.closed


# --- Windows -------------------------------------------------------------------------------------


class Call:
    """A function of a DLL: takes ctypes' declarations, remembers its arguments."""

    def __init__(self, *results: int) -> None:
        self.results = deque(results)
        self.calls: list[tuple[Any, ...]] = []
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return self.results.popleft() if len(self.results) > 1 else self.results[0]


WAIT_OBJECT_0, WAIT_TIMEOUT = 0, 258


def test_a_handle_is_waited_for_and_closed() -> None:
    api = SimpleNamespace(
        OpenProcess=Call(77),
        WaitForSingleObject=Call(WAIT_TIMEOUT, WAIT_TIMEOUT, WAIT_TIMEOUT, WAIT_OBJECT_0),
        CloseHandle=Call(1),
    )
    end = HandleEnd(42, api, lambda: 0)
    assert api.OpenProcess.calls == [(0x00100000, False, 42)]
    assert api.OpenProcess.restype is ctypes.c_void_p  # a handle is 64 bits wide
    assert api.CloseHandle.calls == []
    end.wait()
    # In turns, so that Ctrl-C is handled in between.
    assert api.WaitForSingleObject.calls == [(77, 0), *[(77, 250)] * 3]
    assert api.CloseHandle.calls == [(77,)]


def test_exited_process_with_an_open_handle_is_not_found() -> None:
    api = SimpleNamespace(OpenProcess=Call(77), WaitForSingleObject=Call(WAIT_OBJECT_0), CloseHandle=Call(1))
    with pytest.raises(ProcessLookupError):
        HandleEnd(42, api, lambda: 0)
    assert api.CloseHandle.calls == [(77,)]


@pytest.mark.parametrize(("code", "error"), [(5, PermissionError), (87, ProcessLookupError)])
def test_a_process_that_cannot_be_opened(code: int, error: type[OSError]) -> None:
    api = SimpleNamespace(OpenProcess=Call(0), WaitForSingleObject=Call(0), CloseHandle=Call(1))
    with pytest.raises(error):
        HandleEnd(42, api, lambda: code)


class FakeJobs:
    """The part of kernel32 that is about job objects. ``refuses`` names a call that fails."""

    def __init__(self, refuses: str = "") -> None:
        self.limits = 0
        self.calls: list[tuple[str, Any]] = []
        self.CreateJobObjectW = Call(0 if refuses == "CreateJobObjectW" else 99)
        self._refuses = refuses

    def SetInformationJobObject(self, job: Any, kind: int, limits: Any, size: int) -> int:
        assert (job.value, kind) == (99, 9)  # JobObjectExtendedLimitInformation
        assert size == ctypes.sizeof(ExtendedLimits)
        self.limits = limits._obj.BasicLimitInformation.LimitFlags
        return self._answer("SetInformationJobObject", None)

    def AssignProcessToJobObject(self, job: Any, process: Any) -> int:
        return self._answer("AssignProcessToJobObject", (job.value, process.value))

    def TerminateJobObject(self, job: Any, code: int) -> int:
        return self._answer("TerminateJobObject", (job.value, code))

    def CloseHandle(self, job: Any) -> int:
        return self._answer("CloseHandle", job.value)

    def _answer(self, name: str, arguments: Any) -> int:
        self.calls.append((name, arguments))
        return int(name != self._refuses)


def test_a_job_ends_what_is_in_it_when_its_last_handle_closes() -> None:
    api = FakeJobs()
    job = JobObject(api)
    assert api.limits == 0x2000  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    job.adopt(55)
    job.kill()
    job.close()
    job.close()
    job.kill()  # nothing is left
    assert api.calls[1:] == [
        ("AssignProcessToJobObject", (99, 55)),
        ("TerminateJobObject", (99, 1)),
        ("CloseHandle", 99),
    ]


@pytest.mark.skipif(sys.maxsize < 2**32, reason="the size of 64-bit Windows")
def test_struct_of_limits_has_windows_size() -> None:
    assert ctypes.sizeof(ExtendedLimits) == 144


@pytest.mark.parametrize("name", ["CreateJobObjectW", "SetInformationJobObject"])
def test_a_job_that_cannot_be_made_is_an_error(name: str) -> None:
    with pytest.raises(OSError, match=name):
        JobObject(FakeJobs(refuses=name))


def test_a_job_that_cannot_be_made_leaves_no_handle() -> None:
    api = FakeJobs(refuses="SetInformationJobObject")
    with pytest.raises(OSError, match="SetInformationJobObject"):
        JobObject(api)
    assert api.calls[-1] == ("CloseHandle", 99)


def test_a_job_that_refuses_to_end_its_processes_is_no_error() -> None:
    """The exit of the child is reported all the same; the close of the job ends them."""
    JobObject(FakeJobs(refuses="TerminateJobObject")).kill()


class FakePopen:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self._handle = 55

    def kill(self) -> None:
        self._calls.append("kill")

    def wait(self) -> None:
        self._calls.append("wait")


@pytest.mark.parametrize("fails", ["start", "AssignProcessToJobObject", "resume", ""])
def test_child_runs_only_in_its_job_and_no_process_is_left_after_an_error(fails: str) -> None:
    calls: list[str] = []
    api = FakeJobs(refuses=fails)

    def start() -> Any:
        if fails == "start":
            raise FileNotFoundError("start")
        return FakePopen(calls)

    def resume(handle: int) -> None:
        calls.append(f"resume {handle}")
        if fails == "resume":
            raise OSError("resume")

    if fails:
        with pytest.raises(OSError, match=fails):
            started_in(JobObject(api), start, resume)
    else:
        started_in(JobObject(api), start, resume)
    assert (
        calls
        == {
            "start": [],
            "AssignProcessToJobObject": ["kill", "wait"],
            "resume": ["resume 55", "kill", "wait"],
            "": ["resume 55"],
        }[fails]
    )
    assert (api.calls[-1] == ("CloseHandle", 99)) is bool(fails)
