"""The tour of docs/get-started.md, the commands of the README, and marked blocks of pages, run as written.

Only the port is another one, and the demo runs in the background.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit.paths import ROOT
from tests.kit.tour import FIRST, README, SERVING, SHELL, blocks, commands_of, marked_blocks

PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture
def path_with_llamasup(monkeypatch: pytest.MonkeyPatch, llama_server: str) -> None:
    """PATH as after an installation: first the environment of llamasup, then the folder of llama-server."""
    folders = [str(Path(sys.executable).parent), str(Path(llama_server).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))


@pytest.fixture
def demo(path_with_llamasup: None) -> Iterator[Llamasup]:
    with llamasup("demo") as running:
        running.wait_for("ready")
        yield running
        assert (running.end() if running.process.poll() is not None else running.stop()) == 0, (
            running.stderr_text
        )


def test_tour_begins_with_the_demo() -> None:
    assert blocks("sh")[0].strip() == FIRST
    assert len(SHELL) == 3
    assert len(SERVING) == 1
    assert blocks("sh", README)[0].strip() == FIRST


def test_demo_prints_the_output_shown_in_the_tour(demo: Llamasup) -> None:
    (shown,) = blocks("text")
    assert demo.stop() == 0  # its output is complete now
    for line in shown.splitlines():
        label = line[: line.index(" ", 2)] if line.startswith("  ") else "demo is ready at http://127.0.0.1:"
        assert label in demo.stderr_text, label


def in_shell(block: str, demo: Llamasup, folder: Path) -> subprocess.CompletedProcess[str]:
    port = demo.wait_for("ready")["port"]
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.replace("8080", str(port))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=folder,
        check=False,
    )


@pytest.mark.parametrize(
    "block", [*(block for block in SHELL if block not in SERVING), *blocks("sh", README)[1:]]
)
def test_shell_blocks_run(block: str, demo: Llamasup, tmp_path: Path) -> None:
    done = in_shell(block, demo, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
    assert '"error"' not in done.stdout


@pytest.mark.parametrize(
    ("page", "block"), [(page.name, block) for page in PAGES for block in marked_blocks(page)]
)
def test_marked_blocks_of_pages_run(page: str, block: str, demo: Llamasup, tmp_path: Path) -> None:
    done = in_shell(block, demo, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_openai_client_block_prints_an_answer(demo: Llamasup, tmp_path: Path) -> None:
    (block,) = blocks("python")
    port = demo.wait_for("ready")["port"]
    done = subprocess.run(
        [sys.executable, "-c", block.replace("8080", str(port))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


def test_parent_program_reads_the_ready_event_and_stops_with_sigterm(
    path_with_llamasup: None, tmp_path: Path
) -> None:
    (block,) = SERVING
    process = subprocess.Popen(block.split(), stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    with process.stdout as events:
        ready = next(event for event in map(json.loads, events) if event["event"] == "ready")
        assert json.loads((tmp_path / "ready.json").read_text()) == ready
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not (tmp_path / "ready.json").exists()


def test_serve_block_serves_lists_unloads_and_stops_models_as_shown(
    path_with_llamasup: None, tmp_path: Path, tiny_model: Path
) -> None:
    (block,) = (found_block for found_block in blocks("console") if "llamasup serve" in found_block)
    serve, *others = commands_of(block)
    (name,) = set(re.findall(r'"model": "(.+?)"', block))
    (tmp_path / "models").mkdir()
    shutil.copy(tiny_model, tmp_path / "models" / f"{name}.gguf")
    words = [*serve.replace("~", str(tmp_path)).split(), "--port", "0", "--events", "jsonl"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    with process.stdout as events:
        ready = next(event for event in map(json.loads, events) if event["event"] == "ready")
        results = [
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", process.replace("8080", str(ready["port"]))],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=True,
            )
            for process in others
        ]
        assert process.wait(PATIENCE_S) == 0
    answer, table = json.loads(results[0].stdout), results[1].stdout
    assert answer["usage"]["completion_tokens"] == 8
    assert table.splitlines()[1].split()[:2] == [name, "ready"]


def test_key_new_creates_a_key_as_shown(path_with_llamasup: None, tmp_path: Path) -> None:
    (block,) = (found_block for found_block in blocks("console") if "key new" in found_block)
    made = commands_of(block)[0].split()
    done = subprocess.run(made, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, check=True)
    assert done.stdout.startswith("llamasup-")
    assert "name=phone" in (tmp_path / "keys").read_text()
