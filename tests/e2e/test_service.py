"""``llamasup service`` as a command: the files it writes and removes, its output, and its errors.

Its ``systemctl`` is a small program of the test that writes down what it is asked; the real one is in
tests/features/systemd. Only ``--user`` units are written: their folder belongs to the test.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from llamasup.features.systemd.unit_file import MARKER
from tests.e2e.driver import run_to_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux")

_SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in
    *daemon-reload*) [ ! -e "$0.broken" ] || { echo "Failed to reload daemon: no" >&2; exit 1; } ;;
    *" show llamasup-"*)
        printf 'LoadState=loaded\\nActiveState=active\\nSubState=running\\nMainPID=42\\nNRestarts=1\\n'
        printf 'StatusText=serving tiny at http://127.0.0.1:8080, 4 slots\\nMemoryCurrent=1048576\\n'
        printf 'UnitFileState=enabled\\nResult=success\\nExecMainStatus=0\\n' ;;
    *--version*) echo "systemd 252 (252.38)" ;;
esac
"""


class Desk:
    """A user's folders, and the systemctl on their PATH."""

    def __init__(self, tmp_path: Path) -> None:
        self.config = tmp_path / "config"
        self.units = self.config / "systemd/user"
        self._systemctl = tmp_path / "bin/systemctl"
        self._systemctl.parent.mkdir()
        self._systemctl.write_text(_SYSTEMCTL)
        self._systemctl.chmod(0o755)

    def service(self, *arguments: str, path: str | None = None, **environ: str) -> CompletedProcess[str]:
        search = path if path is not None else f"{self._systemctl.parent}:{os.environ['PATH']}"
        env = {**os.environ, "XDG_CONFIG_HOME": str(self.config), "PATH": search, **environ}
        return run_to_end("service", *arguments, env=env)

    @property
    def asked(self) -> list[str]:
        log = self._systemctl.with_name("systemctl.log")
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.removeprefix("--user --no-pager --no-ask-password ") for line in lines]

    def break_reload(self) -> None:
        self._systemctl.with_name("systemctl.broken").touch()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


RUNTIME = ("--runtime", "embedded")


def test_install_writes_the_unit_that_print_shows_and_uninstall_removes_it(
    desk: Desk, tiny_model: Path
) -> None:
    printed = desk.service("print", str(tiny_model), "--user", *RUNTIME, "--ctx-size", "512")
    assert printed.returncode == 0, printed.stderr
    done = desk.service("install", str(tiny_model), "--user", *RUNTIME, "--ctx-size", "512", "--now")
    assert done.returncode == 0, done.stderr
    unit = desk.units / "llamasup-tiny.service"
    assert unit.read_text() == printed.stdout
    assert unit.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in desk.units.iterdir()] == [unit.name]
    assert f"run {tiny_model} --ctx-size 512 --host 127.0.0.1" in unit.read_text()
    assert desk.asked[-3:] == ["daemon-reload", f"enable {unit.name}", f"restart {unit.name}"]

    again = desk.service("install", str(tiny_model), "--user", *RUNTIME, "--ctx-size", "512", "--json")
    assert json.loads(again.stdout) == {
        "unit": unit.name,
        "path": str(unit),
        "changed": False,
        "started": False,
    }
    assert f"systemctl --user enable --now {unit.name}" in again.stderr

    removed = desk.service("uninstall", "tiny", "--user", "--json")
    assert removed.returncode == 0, removed.stderr
    assert json.loads(removed.stdout)["removed"] is True
    assert not unit.exists()
    assert desk.asked[-3:] == [f"disable --now {unit.name}", "daemon-reload", f"reset-failed {unit.name}"]
    assert json.loads(desk.service("uninstall", "tiny", "--user", "--json").stdout)["removed"] is False


@pytest.mark.parametrize("name", ["tiny", "llamasup-tiny.service", "/somewhere/tiny.gguf"])
def test_service_status_shows_the_state_of_the_service(desk: Desk, name: str) -> None:
    shown = json.loads(desk.service("status", name, "--user", "--json").stdout)
    assert shown == {
        "unit": "llamasup-tiny.service",
        "path": str(desk.units / "llamasup-tiny.service"),
        "installed": False,
        "loaded": True,
        "enabled": True,
        "active": "active",
        "sub": "running",
        "result": "success",
        "exit_code": 0,
        "status": "serving tiny at http://127.0.0.1:8080, 4 slots",
        "pid": 42,
        "restarts": 1,
        "since": None,
        "memory_bytes": 1048576,
    }
    text = desk.service("status", name, "--user").stdout
    assert "status        serving tiny at http://127.0.0.1:8080, 4 slots" in text


@pytest.mark.parametrize("foreign", ["[Unit]\nDescription=mine\n", None])
def test_foreign_unit_files_are_left_alone(desk: Desk, tiny_model: Path, foreign: str | None) -> None:
    unit = desk.units / "llamasup-tiny.service"
    unit.parent.mkdir(parents=True)
    if foreign is None:
        unit.symlink_to("/dev/null")  # masked
    else:
        unit.write_text(foreign)
    for command in (["install", str(tiny_model), *RUNTIME], ["uninstall", "tiny"]):
        done = desk.service(*command, "--user")
        assert done.returncode == 78
        assert "llamasup has not written it" in done.stderr
    assert unit.is_symlink() if foreign is None else unit.read_text() == foreign


def test_own_unit_is_changed_in_place(desk: Desk, tiny_model: Path) -> None:
    unit = desk.units / "llamasup-tiny.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"{MARKER}\n[Unit]\nDescription=older\n")
    done = desk.service("install", str(tiny_model), "--user", *RUNTIME)
    assert f"Changed {unit}" in done.stderr
    assert "older" not in unit.read_text()


def test_errors_of_systemd_are_shown(desk: Desk, tiny_model: Path) -> None:
    desk.break_reload()
    done = desk.service("install", str(tiny_model), "--user", *RUNTIME)
    assert done.returncode == 71
    assert "`systemctl --user daemon-reload` failed: Failed to reload daemon: no" in done.stderr


def test_without_systemd_nothing_is_written(desk: Desk, tiny_model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = desk.service("install", str(tiny_model), "--user", *RUNTIME, path=str(empty))
    assert done.returncode == 71
    assert "no systemctl on PATH" in done.stderr
    assert not desk.units.exists()
    assert desk.service("status", "tiny", path=str(empty)).returncode == 71
    # A unit for another machine can be printed all the same.
    assert desk.service("print", str(tiny_model), *RUNTIME, path=str(empty)).returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write the system's units")
def test_system_units_require_root(desk: Desk, tiny_model: Path) -> None:
    done = desk.service("install", str(tiny_model), *RUNTIME)
    assert done.returncode == 71
    assert "--user" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--name", "a/b"], 2, "'a/b' is not a valid name for a service"),
        (["--name", ".."], 2, "is not a valid name for a service"),
        (["--port", "80"], 2, "--port 80 needs a privilege"),
        (["--port", "65536"], 2, "--port 65536 is not a valid port"),
        (["--run-as", "no such user"], 2, "There is no user 'no such user'"),
        (["--user", "--run-as", "root"], 2, "exclude each other"),
        (["--host", "0.0.0.0"], 78, "no API key is set"),
        (["--api-key-file", "MISSING"], 78, "cannot be read"),
        (["--log-level", "loud"], 2, "'loud'"),
        (["--log-format", "xml"], 2, "'xml'"),
        (["--ctx-size", "many"], 2, "'many' is not a whole number"),
        (["--mmproj", "MISSING"], 66, "--mmproj"),
        (["two.gguf"], 2, "unexpected argument"),
    ],
)
def test_service_that_could_not_run_is_not_installed(
    desk: Desk, tiny_model: Path, tmp_path: Path, options: list[str], code: int, said: str
) -> None:
    missing = str(tmp_path / "missing.gguf")
    words = [missing if word == "MISSING" else word for word in options]
    done = desk.service("install", str(tiny_model), *RUNTIME, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(line.startswith("enable") for line in desk.asked)


@pytest.mark.parametrize("name", ["missing.gguf", "in\nvalid.gguf"])
def test_unservable_model_is_refused_with_the_error_of_run(desk: Desk, tmp_path: Path, name: str) -> None:
    if "\n" in name:
        (tmp_path / name).write_bytes(b"GGUF" + bytes(60))
    done = desk.service("print", str(tmp_path / name), *RUNTIME)
    assert done.returncode == (65 if "\n" in name else 66)


def test_relative_path_with_odd_characters_becomes_absolute(
    desk: Desk, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / 'a b 50% $x "q" é.gguf'
    model.write_bytes(tiny_model.read_bytes())
    done = run_to_end("service", "print", model.name, "--user", *RUNTIME, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f'run "{tmp_path}/a b 50%% $$x \\"q\\" é.gguf"' in done.stdout
    refused = run_to_end("service", "print", model.name, *RUNTIME, cwd=tmp_path)
    assert refused.returncode == 2
    assert "Rename the file" in refused.stderr


@pytest.mark.parametrize("name", ["", "/", "."])
def test_install_without_a_model_is_refused(desk: Desk, name: str) -> None:
    for command in ("status", "uninstall"):
        done = desk.service(command, name, "--user")
        assert (done.returncode, "is not the name of a service" in done.stderr) == (2, True)
    assert desk.asked == []


def test_sandbox_contains_paths_with_dots_and_files_of_extra_flags(
    desk: Desk, tiny_model: Path, tmp_path: Path
) -> None:
    """systemd ignores a BindReadOnlyPaths= with "..", and /tmp is another one for the service."""
    (tmp_path / "here").mkdir()
    (tmp_path / "m.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    words = ("print", "../m.gguf", *RUNTIME, "--", "--chat-template-file", "../chat.jinja")
    done = run_to_end("service", *words, cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert f" run {tmp_path}/m.gguf " in done.stdout
    assert f" --chat-template-file {tmp_path}/chat.jinja" in done.stdout
    visible = [line.split('"-')[1][:-1] for line in done.stdout.splitlines() if line.startswith("Bind")]
    assert {f"{tmp_path}/m.gguf", f"{tmp_path}/chat.jinja"} <= set(visible)
    assert ".." not in done.stdout


def test_all_that_prevents_a_service_is_reported_at_once(
    desk: Desk, tiny_model: Path, tmp_path: Path
) -> None:
    """Users fixed one and met the next: ollama/ollama#2701 (the folder, then its parent), #9877, #10672."""
    tmp_path.chmod(0o755)
    for name in ("a.gguf", "draft.gguf"):
        (tmp_path / name).write_bytes(tiny_model.read_bytes())
        (tmp_path / name).chmod(0o600)
    words = ["print", str(tmp_path / "a.gguf"), "--draft-model", str(tmp_path / "draft.gguf"), *RUNTIME]
    words += ["--port", "80", "--host", "0.0.0.0", "--name", "a b", "--access-log", "/nowhere/access.log"]
    done = desk.service(*words)
    assert done.returncode == 2  # of the first
    assert done.stderr.startswith("llamasup: 5 problems prevent this service:\n")
    for said in (
        "'a b' is not a valid name for a service.",
        "--port 80 needs a privilege",
        "--host 0.0.0.0 can be reached from other machines",
        "the folder /nowhere does not exist",
        f"{tmp_path}/a.gguf has mode 0600",
        f"{tmp_path}/draft.gguf has mode 0600",
    ):
        assert said in done.stderr
    assert done.stderr.count("  → ") == 5  # each has its remedy
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("model", "options", "code", "said"),
    [
        (
            "missing.gguf",
            ("--runtime", "/nowhere/llama-server"),
            66,
            ("missing.gguf", "/nowhere/llama-server"),
        ),
        ('odd".gguf', ("--api-key-file", "odd\\"), 2, ('odd"', "odd\\")),
        (
            "missing.gguf",
            (*RUNTIME, "--run-as", "no-such-user"),
            2,
            ("no user 'no-such-user'", "missing.gguf"),
        ),
    ],
)
def test_checks_after_a_missing_file_are_made_too(
    desk: Desk,
    tiny_model: Path,
    tmp_path: Path,
    model: str,
    options: tuple[str, ...],
    code: int,
    said: list[str],
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / 'odd".gguf').write_bytes(tiny_model.read_bytes())
    key = tmp_path / "odd\\"
    key.write_text(f"{'k' * 40}\n")
    key.chmod(0o600)
    words = [str(tmp_path / word) if word.startswith("odd") else word for word in options]
    runtime = () if "--runtime" in words else RUNTIME
    done = desk.service("print", str(tmp_path / model), *words, *runtime)
    assert (done.returncode, "problems prevent this service" in done.stderr) == (code, True), done.stderr
    assert all(text in done.stderr for text in said), done.stderr


def test_model_unreadable_for_the_service_user_is_refused(
    desk: Desk, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "private.gguf"
    model.write_bytes(tiny_model.read_bytes())
    model.chmod(0o600)
    done = desk.service("print", str(model), *RUNTIME)
    assert done.returncode == 78
    assert f"{model} has mode 0600" in done.stderr
    assert "--run-as" in done.stderr
    assert desk.service("print", str(model), *RUNTIME, "--run-as", "root").returncode == 0


def test_key_from_the_environment_is_not_written_into_the_unit(desk: Desk, tiny_model: Path) -> None:
    done = desk.service("install", str(tiny_model), "--user", *RUNTIME, LLAMASUP_API_KEY="s3cret")
    assert "does not see your $LLAMASUP_API_KEY" in done.stderr
    assert "s3cret" not in (desk.units / "llamasup-tiny.service").read_text()
