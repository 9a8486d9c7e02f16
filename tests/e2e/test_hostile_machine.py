"""Bad input that no model file brings: disks, folders, clocks and children that do not behave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import Llamasup, is_alive, llamasup, run_to_end, seconds_until_gone
from tests.kit.fake_server import install

ServerMaker = Callable[..., str]
DAY_S = 86_400


def asked(running: Llamasup) -> int:
    answer = httpx.post(f"{running.url}/completion", json={"prompt": "x"}, timeout=60)
    return answer.status_code


def warnings(running: Llamasup) -> list[str]:
    records = [json.loads(line) for line in running.stderr_text.splitlines()]
    return [record["message"] for record in records if record["level"] == "warning"]


# --- disks ---------------------------------------------------------------------------------------


def mounted(folder: Path, options: str) -> list[str]:
    """Runs what follows where only it sees a small file system at ``folder``."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and unshare")
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(folder)]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no mount")
    return words


def test_full_disk_under_the_log_folder_affects_only_the_log(
    tiny_model: Path, fake_server: ServerMaker, own_folders: Path
) -> None:
    """1 MB of log into 64 KiB: one warning, and this child and the next one serve requests."""
    disk = mounted(own_folders / "state", "size=64k,mode=700")
    server = fake_server("log_bytes=1000000")
    with llamasup(tiny_model, "--runtime", server, "--log-format", "json", prefix=disk) as running:
        running.wait_for("ready")
        assert asked(running) == 200
        (child,) = running.children()
        child.kill()
        running.wait_for("state", state="ready", generation=2)
        assert asked(running) == 200
        assert running.stop() == 0
        reported = [warning for warning in warnings(running) if "No space left on device" in warning]
    assert 1 <= len(reported) <= 2  # once for each server's log


@pytest.mark.parametrize("place", ["state", "run"])
def test_unwritable_folder_does_not_prevent_serving(
    place: str, tiny_model: Path, fake_server: ServerMaker, own_folders: Path
) -> None:
    """The log is not kept, with a warning; the run folder is created in the temporary folder."""
    disk = mounted(own_folders / place, "ro,mode=700")
    with llamasup(tiny_model, "--runtime", fake_server(), "--log-format", "json", prefix=disk) as running:
        running.wait_for("ready")
        assert asked(running) == 200
        (child,) = running.children()
        folder = Path(child.cwd())
        assert folder.is_relative_to(own_folders / "run") == (place != "run")
        assert running.stop() == 0
        reported = [warning for warning in warnings(running) if "output is not kept" in warning]
        assert len(reported) == (1 if place == "state" else 0)
        assert not folder.exists()


def nobody(*variables: str, uid: int = 1000670000) -> list[str]:
    """Runs what follows as a user without a name, which may read all files, with these variables alone."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user needs root and setpriv")
    reads = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", f"--reuid={uid}", "--regid=0", "--clear-groups", *reads]
    path = f"PATH={os.environ['PATH']}"
    return [*user, "--bounding-set=-all,+dac_read_search", "env", "-i", path, *variables]


@pytest.mark.parametrize(
    "variables",
    [
        [],
        ["HOME=/"],
        ["HOME=/nonexistent"],
        ["HOME=/dev/null"],
        ["HOME=", "USER=nobody"],
        ["HOME=/proc/self", "XDG_CACHE_HOME=relative"],
    ],
    ids=" ".join,
)
def test_user_without_a_home_is_served_and_told_that_nothing_is_kept(
    variables: list[str],
) -> None:
    """OpenShift runs each container as a random user."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o777)
    prefix = nobody(*variables, f"TMPDIR={place}")
    words = ["--runtime", str(install(place / "llama-server")), "--log-format", "json"]
    try:
        with llamasup("demo", *words, prefix=prefix, cwd=place) as running:
            running.wait_for("ready")
            assert asked(running) == 200
            assert running.stop() == 0
            (warning,) = warnings(running)
        assert "nor the usage and what was measured" in warning
        assert "Set HOME or XDG_STATE_HOME" in warning
    finally:
        shutil.rmtree(place)


READ_ONLY = {"HOME": "/proc", "XDG_CACHE_HOME": "", "XDG_STATE_HOME": "", "XDG_RUNTIME_DIR": "/proc"}


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY"])
def test_one_writable_folder_is_enough(variable: str, fake_server: ServerMaker, tmp_path: Path) -> None:
    """``docker run --read-only --tmpfs FOLDER``: nothing else can be written, not even by root."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    env = {**os.environ, **READ_ONLY, "TMPDIR": "/proc", variable: str(place)}
    try:
        with llamasup("demo", "--runtime", fake_server(), env=env, cwd=tmp_path) as running:
            running.wait_for("ready")
            assert asked(running) == 200
            assert running.stop() == 0
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("command", [["plan", "demo"], ["run", "demo", "--port=0"], ["serve", "--port=0"]])
def test_machine_without_a_writable_folder_is_told_to_set_one(
    command: list[str], fake_server: ServerMaker, tmp_path: Path
) -> None:
    env = {**os.environ, **READ_ONLY, "TMPDIR": "/proc"}
    words = ["--models-dir", str(tmp_path)] if command[0] == "serve" else []
    done = run_to_end(*command, *words, "--runtime", fake_server(), env=env)
    assert done.returncode == 73, done.stderr
    assert "cannot use /proc" in done.stderr
    assert "Set TMPDIR or XDG_RUNTIME_DIR" in done.stderr


def test_plan_needs_no_writable_folder(fake_server: ServerMaker, tiny_model: Path) -> None:
    env = {**os.environ, **READ_ONLY, "TMPDIR": "/proc"}
    done = run_to_end("plan", str(tiny_model), "--runtime", fake_server(), env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tasks", [2, 3])
def test_limit_of_processes_is_named(tasks: int) -> None:
    """``docker run --pids-limit``; Mattermost's image has 200."""
    if shutil.which("prlimit") is None:
        pytest.skip("needs prlimit")
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o777)
    limited = [*nobody(f"TMPDIR={place}", uid=1000670000 + tasks), "prlimit", f"--nproc={tasks}"]
    server = str(install(place / "llama-server"))
    try:
        done = run_to_end("run", "demo", "--port=0", "--runtime", server, prefix=limited, cwd=place)
        assert done.returncode == 71, done.stderr
        assert "the limit of processes and threads is reached" in done.stderr
        assert "--pids-limit" in done.stderr
    finally:
        shutil.rmtree(place)


# --- clocks --------------------------------------------------------------------------------------

_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

/* The wall clock, as many seconds off as the file $JUMP_FILE says. */
static long off(void) {
    long seconds = 0;
    const char *path = getenv("JUMP_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += off();
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
"""


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the wall clock of every llamasup that is started from now on so many seconds off."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is missing")
    (tmp_path / "clock.c").write_text(_CLOCK)
    library, jump_file = tmp_path / "clock.so", tmp_path / "jump"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    jump_file.write_text("0")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("JUMP_FILE", str(jump_file))

    def jump(seconds: int) -> None:
        jump_file.write_text(str(seconds))
        seen = subprocess.check_output([sys.executable, "-c", "import time; print(time.time())"])
        true_s = datetime.now(UTC).timestamp()
        assert abs(float(seen) - true_s - seconds) < DAY_S / 2

    return jump


def test_clock_jumps_affect_neither_serving_nor_restarts(
    jump: Callable[[int], None], tiny_model: Path, fake_server: ServerMaker
) -> None:
    """A day ahead, two days back: as after a suspend, or when the first time server answers."""
    with llamasup(tiny_model, "--runtime", fake_server("token_s=0.05")) as running:
        running.wait_for("ready")
        for generation, seconds in enumerate((DAY_S, -DAY_S), start=2):
            jump(seconds)
            assert asked(running) == 200
            (child,) = running.children()
            child.kill()
            running.wait_for("state", state="ready", generation=generation)
            assert asked(running) == 200
            # A llamasup that starts now must not treat the older one as dead and remove its folder.
            with llamasup(tiny_model, "--runtime", fake_server()) as neighbour:
                neighbour.wait_for("ready")
                assert asked(running) == 200
                assert neighbour.stop() == 0
                assert "Cleaned up after" not in neighbour.stderr_text
        exits = [event for event in running.events if event["event"] == "exit"]
        assert [event["cause"] for event in exits] == ["killed", "killed"]
        jump(3 * DAY_S)
        assert running.stop() == 0


# --- children ------------------------------------------------------------------------------------


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def test_fork_of_an_exited_child_ends_before_the_next_start(
    tiny_model: Path, fake_server: ServerMaker, tmp_path: Path
) -> None:
    """A daemon leaves its process group and its parent, and would keep the memory."""
    started = tmp_path / "started"
    daemon = script(
        tmp_path / "daemon",
        f'case "$*" in *--model*) ;; *) exec "{fake_server()}" "$@" ;; esac',
        f"setsid sh -c 'echo $$ >>{started}; exec sleep 600' >/dev/null 2>&1 </dev/null &",
        f"while [ ! -s {started} ]; do :; done",
        "exit 0",
    )
    with llamasup(tiny_model, "--runtime", daemon) as running:
        first = running.wait_for("exit")
        assert (first["code"], first["signal"]) == (0, None)
        running.wait_for("state", state="starting", generation=2)
        numbers = started.read_text().split()
        assert not _lives(int(numbers[0]))
        running.send_signal(signal.SIGTERM)
        running.end()
        for number in started.read_text().split():
            assert not _lives(int(number))


def _lives(pid: int) -> bool:
    try:
        return is_alive(psutil.Process(pid)) and "sleep" in psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return False


def test_processes_in_the_group_of_a_server_end_with_it(tiny_model: Path, fake_server: ServerMaker) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("grandchild=stay")) as running:
        running.wait_for("ready")
        children = running.children()
        assert len(children) == 2
        assert running.stop() == 0
        seconds_until_gone(children)
