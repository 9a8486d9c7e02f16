"""A real llama-server that dies of a segmentation fault while it reads its file."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from llamasup.effects.experience import recall
from llamasup.testing.models import write_large_decoder
from tests.e2e.driver import Llamasup, llamasup, run_to_end

pytestmark = pytest.mark.real

# Read in some hundred ms: long enough to be met while it is read.
_MODEL_BYTES = 400_000_000
_CONTEXT = ("--ctx-size", "512")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    write_large_decoder(path, _MODEL_BYTES)
    return path


def kill_while_it_reads(running: Llamasup, model: Path) -> None:
    """SIGSEGV to the child as soon as it has the model's file open or mapped."""
    running.wait_for("state", state="starting")
    with_file = None
    while with_file is None:
        assert running.process.poll() is None
        for child in running.children():
            maps = Path(f"/proc/{child.pid}/maps")
            try:
                opened = [Path(file.path) for file in child.open_files()]
                if model in opened or str(model) in maps.read_text():
                    with_file = child
            except (psutil.Error, OSError):
                continue
    with_file.send_signal(signal.SIGSEGV)


def flash_attn(model: Path, runtime: str) -> str | None:
    shown = json.loads(run_to_end("plan", str(model), "--runtime", runtime, *_CONTEXT, "--json").stdout)
    return dict(pairwise(shown["argv"])).get("--flash-attn")


def test_crashes_while_the_file_is_read_change_no_later_plan(runtime: str, large: Path) -> None:
    before = flash_attn(large, runtime)
    for _ in range(2):
        with llamasup(large, "--runtime", runtime, *_CONTEXT) as running:
            kill_while_it_reads(running, large)
            crashed = running.wait_for("exit")
            assert crashed["signal"] == "SIGSEGV"
            assert crashed["cause"] == "segfault"
            running.wait_for("ready")  # with the smaller plan, at once
            assert running.stop() == 0
    assert recall(large).setbacks == ()
    assert flash_attn(large, runtime) == before
    with llamasup(large, "--runtime", runtime, *_CONTEXT) as running:
        running.wait_for("ready")
        assert running.stop() == 0
    assert "--flash-attn" not in running.said
