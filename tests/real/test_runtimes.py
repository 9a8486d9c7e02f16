"""Builds are installed from a release, proven with a real token, used, and removed."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.driver import command, run_to_end, started
from tests.features.runtimes.releases import release
from tests.kit.hub import Fault, Hub, running_hub
from tests.kit.patience import PATIENCE_S

ARCHIVE = "llama-b11462-bin-ubuntu-x64.tar.gz"


@pytest.fixture(scope="module")
def archive(llama_server: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An archive with the name of a release's, and the real llama-server in it."""
    path = tmp_path_factory.mktemp("archive") / "archive.tar"
    known: dict[tuple[str, int], str] = {}  # a wheel has copies in place of links
    with tarfile.open(path, "w") as opened:
        for file in sorted(Path(llama_server).resolve().parent.iterdir()):
            first = known.setdefault((file.name.partition(".so")[0], file.stat().st_size), file.name)
            info = opened.gettarinfo(file, f"llama-b11462/{file.name}")
            if first != file.name:
                info.type, info.linkname, info.size = tarfile.SYMTYPE, first, 0
            with file.open("rb") as content:
                opened.addfile(info, content if first == file.name else None)
    return path.read_bytes()


@pytest.fixture
def hub(archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("LLAMASUP_RUNTIME", raising=False)
    with running_hub() as running:
        offer(running, {ARCHIVE: archive})
        monkeypatch.setenv("LLAMASUP_RELEASES", f"{running.url}/releases")
        yield running


def offer(hub: Hub, files: dict[str, bytes], build: str = "b11462") -> None:
    hub.plain |= {f"/{name}": content for name, content in files.items()}
    answer = release(files, hub.url, build=build)
    hub.plain |= {"/releases/latest": answer, f"/releases/tags/{build}": answer}


def runtime(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_to_end("runtime", *words)
    assert done.returncode == code, done.stderr
    return done


def installed() -> dict[str, bool]:
    return {each["name"]: each["used"] for each in json.loads(runtime("list", "--json").stdout)["runtimes"]}


def left_behind() -> list[str]:
    folder = Path(os.environ["XDG_DATA_HOME"]) / "llamasup" / "runtimes"
    return sorted(path.name for path in folder.glob(".*") if path.name != ".lock")


def test_build_is_installed_used_left_and_removed(hub: Hub, archive: bytes) -> None:
    done = runtime("install", "--backend", "cpu")
    path = done.stdout.strip()
    assert path.endswith("/b11462-cpu/llama-b11462/llama-server")
    assert left_behind() == []
    assert path in run_to_end("plan", "demo").stdout
    hub.plain.pop(f"/{ARCHIVE}")
    runtime("install", "b11462", "--backend", "cpu")  # it is here: nothing is downloaded again
    newer = ARCHIVE.replace("b11462", "b11500")
    offer(hub, {newer: archive}, "b11500")
    runtime("install", "--backend", "cpu", "--no-use")
    assert installed() == {"b11500-cpu": False, "b11462-cpu": True}
    runtime("use", "b11500")
    assert installed() == {"b11500-cpu": True, "b11462-cpu": False}
    runtime("use", "previous")
    assert "New starts use b11462-cpu" in runtime("remove", "b11462-cpu", code=75).stderr
    with started("run", "demo", "--port", "0", "--runtime", "b11500-cpu") as server:
        server.wait_for("ready")
        assert "runs b11500-cpu" in runtime("remove", "b11500", code=75).stderr
    runtime("remove", "b11500")
    runtime("prune")
    assert installed() == {"b11462-cpu": True}
    assert left_behind() == []


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (Fault("latest", times=99, status=404), 66, "404"),
        (Fault("latest", change=lambda _: b"<html>"), 75, "cannot be read"),
        (Fault(ARCHIVE, times=99, change=lambda body: body[:-1] + b"x"), 65, "checksum"),
        (Fault(ARCHIVE, times=99, change=lambda body: body[:-512]), 75, "announced"),
        (Fault(ARCHIVE, times=99, redirect="http://127.0.0.2:9/archive"), 78, "plain http"),
        (Fault(ARCHIVE, times=99, status=403), 66, "403"),
    ],
    ids=["no release", "no list", "other bytes", "other size", "redirect", "forbidden"],
)
def test_broken_download_installs_nothing(hub: Hub, fault: Fault, code: int, text: str) -> None:
    hub.faults = [fault]
    done = run_to_end("runtime", "install", "--backend", "cpu")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code
    assert installed() == {}


def test_cut_download_continues(hub: Hub) -> None:
    hub.faults = [Fault(ARCHIVE, cut_after=1 << 20, only_parts=True)]
    runtime("install", "--backend", "cpu")
    assert len(hub.parts()) == len(set(hub.parts()))  # no byte was requested twice
    assert installed() == {"b11462-cpu": True}


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("#!/bin/sh\nexit 1\n", "does not serve"),
        ("#!/bin/sh\nkill -ILL $$\n", "does not serve"),
        ("\x7fELF", "does not serve"),
    ],
)
def test_build_that_gives_no_token_is_not_installed(
    hub: Hub, tmp_path: Path, program: str, text: str
) -> None:
    (tmp_path / "llama-server").write_text(program)
    (tmp_path / "llama-server").chmod(0o755)
    with tarfile.open(tmp_path / "own.tar.gz", "w:gz") as opened:
        opened.add(tmp_path / "llama-server", "llama-server")
    done = run_to_end("runtime", "install", "--from", str(tmp_path / "own.tar.gz"))
    assert text in done.stderr
    assert done.returncode == 69
    assert installed() == {}
    assert left_behind() in ([], [".downloads"])


def test_build_that_is_gone_is_reported_until_another_one_is_chosen(hub: Hub, tmp_path: Path) -> None:
    runtime("install", "--backend", "cpu")
    config = tmp_path / "config.yaml"
    config.write_text("runtime: b11462\nmodels: {demo: {path: demo}}\n")
    assert run_to_end("config", "check", str(config)).returncode == 0
    folder = Path(os.environ["XDG_DATA_HOME"]) / "llamasup" / "runtimes"
    record = folder / "b11462-cpu" / "runtime.json"
    whole = record.read_text()
    for changed in (
        whole.replace("llama-b11462/", "../../"),
        whole.replace('"b11462-cpu"', '"../b11462-cpu"'),
        whole.replace('"llama-b11462/llama-server"', '"/bin/sh"'),
        "{",
    ):
        record.write_text(changed)
        assert installed() == {}
        gone = run_to_end("plan", "demo")
        assert (gone.returncode, "'b11462-cpu'" in gone.stderr) == (69, True)
    record.write_text(whole)
    (folder / "chosen.json").write_text('{"now": "b1')
    assert runtime("prune", code=69).stderr
    runtime("use", "b11462")
    assert installed() == {"b11462-cpu": True}
    (folder / "b11462-cpu" / "llama-b11462" / "llama-server").unlink()
    runtime("install", "--backend", "cpu")  # it is repaired
    assert "b11462-cpu" in run_to_end("plan", "demo").stdout


def test_running_build_is_found_through_a_link(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime("install", "--backend", "cpu", "--no-use")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "link"))
    with started("run", "demo", "--port", "0", "--runtime", "b11462") as server:
        server.wait_for("ready")
        assert "runs b11462-cpu" in runtime("remove", "b11462", code=75).stderr


def test_two_installations_at_once_leave_one_build(hub: Hub) -> None:
    hub.faults = [Fault(ARCHIVE, hold_after=1 << 20)]
    first = subprocess.Popen(command("runtime", "install", "--backend", "cpu"), stderr=subprocess.PIPE)
    assert hub.held.wait(PATIENCE_S)
    second = run_to_end("runtime", "install", "--backend", "cpu")
    hub.released.set()
    _, said = first.communicate(timeout=PATIENCE_S)
    assert (first.returncode, second.returncode) == (0, 75), said
    assert "Another llamasup" in second.stderr
    assert installed() == {"b11462-cpu": True}


def test_killed_installation_leaves_nothing_that_a_start_could_use(hub: Hub) -> None:
    hub.faults = [Fault(ARCHIVE, hold_after=1 << 20, only_parts=True)]
    first = subprocess.Popen(command("runtime", "install", "--backend", "cpu"), stderr=subprocess.DEVNULL)
    assert hub.held.wait(PATIENCE_S)
    first.kill()
    first.wait()
    hub.released.set()
    assert installed() == {}
    runtime("install", "--backend", "cpu")
    assert installed() == {"b11462-cpu": True}
    assert left_behind() == []
