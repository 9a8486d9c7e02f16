"""The guardian runs as long as its supervisor, and then cleans up if necessary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llamasup.core.system.native import native
from llamasup.core.system.process.guardian import Guardian, guarded_run_folder
from tests.e2e.driver import await_removed, seconds_until_gone
from tests.kit.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a job object does it on Windows")


def guardians_of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in (process.info["cmdline"] or []) and process.info["cmdline"][1:3] == ["-I", "-S"]
    ]


def test_guardian_exits_with_a_normal_end() -> None:
    before = psutil.Process().children()
    with guarded_run_folder() as (folder, started):
        started.wait_until_started()
        (guardian,) = guardians_of(folder)
        assert psutil.Process().children() == before  # killing our descendants does not kill it
        assert os.getsid(guardian.pid) != os.getsid(0)
    assert not folder.exists()
    seconds_until_gone([guardian])


def test_immediate_close_leaves_no_process_and_no_descriptor() -> None:
    process = psutil.Process()
    before = process.num_fds(), process.children()
    for _ in range(5):
        with guarded_run_folder() as (folder, _):
            pass
        while guardians_of(folder):
            pass
    assert (process.num_fds(), process.children()) == before


def test_guardian_removes_the_folder_of_a_killed_run() -> None:
    run = (
        "import sys\nfrom llamasup.core.system.process.guardian import guarded_run_folder\n"
        "with guarded_run_folder() as (folder, guardian):\n    guardian.wait_until_started()\n"
        "    print(folder, flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        (guardian,) = guardians_of(folder)
        process.kill()
        await_removed(folder)
        seconds_until_gone([guardian])


def test_sweep_finds_the_package_where_only_the_current_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sys.path`` may have an empty word for it, and the sweep runs in another folder."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(native, "start_guardian", lambda _words, _fd, environ: given.append(environ))
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if path and Path(path) != ROOT)])
    Guardian(tmp_path).close()
    (environ,) = given
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_run_continues_if_the_guardian_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", none_left)
    before = psutil.Process().num_fds()
    Guardian(tmp_path).close()
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("where", ["a frozen application", "process 1"])
def test_no_guardian_where_it_cannot_work(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = psutil.Process()
    if where == "process 1":
        monkeypatch.setattr(os, "getpid", lambda: 1)
    else:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    before = me.num_fds()
    guardian = Guardian(tmp_path)
    assert me.num_fds() == before
    guardian.close()
