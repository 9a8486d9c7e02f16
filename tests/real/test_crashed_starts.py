"""A real llama-server that dies of a segmentation fault while it reads its file."""

from __future__ import annotations

import json
import os
import signal
from itertools import count, pairwise
from pathlib import Path

import psutil
import pytest

from llamasup.core.llama_server.diagnosis import weights_were_read
from llamasup.core.planning.measured.stores import load_history
from tests.e2e.driver import Llamasup, llamasup, run_to_end
from tests.kit.models import write_large_decoder

# The server reads it in some hundred ms: enough time to kill it meanwhile.
_MODEL_BYTES = 400_000_000
_CONTEXT = ("--ctx-size", "512")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    write_large_decoder(path, _MODEL_BYTES, quantization="F16")
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


def crash_while_it_reads(model: Path, runtime: str, log: Path) -> bool:
    """One start that crashes. False: the test came too late, the server had read its file."""
    log.unlink(missing_ok=True)
    with llamasup(model, "--runtime", runtime, *_CONTEXT) as running:
        kill_while_it_reads(running, model)
        crashed = running.wait_for("exit")
        assert crashed["signal"] == "SIGSEGV"
        assert crashed["cause"] == "segfault"
        running.wait_for_ready_after(1)  # at once, with the smaller plan
        assert running.stop() == 0
    *before, served = log.read_text().split("loading model '")[1:]  # the first one may have logged nothing
    assert weights_were_read(served.splitlines())
    return not any(weights_were_read(lines.splitlines()) for lines in before)


def test_crashes_while_the_file_is_read_change_no_later_plan(
    runtime: str, large: Path, own_folders: Path
) -> None:
    before = flash_attn(large, runtime)
    log = own_folders / "state" / "llamasup" / "logs" / "large.log"
    changed_s = count(1)
    while not (crash_while_it_reads(large, runtime, log) and crash_while_it_reads(large, runtime, log)):
        os.utime(large, (next(changed_s),) * 2)  # a file without a history
    assert load_history(large).failed_plans == ()
    assert flash_attn(large, runtime) == before
    with llamasup(large, "--runtime", runtime, *_CONTEXT) as running:
        running.wait_for("ready")
        assert running.stop() == 0
    assert "--flash-attn" not in running.stderr_text
