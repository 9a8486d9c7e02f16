"""The checks of scripts/gpu on this machine: without a GPU, they say nothing about its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.gpu.checks import CHECKS
from scripts.gpu.report import report
from tests.kit.paths import ROOT

SLOW = {"speed", "memory", "memory-taken", "split", "warm-up", "replicas", "usage"}


def measured(tmp_path: Path, *checks: str, runtime: str) -> tuple[int, dict[str, Any], str]:
    found = tmp_path / "results.json"
    command = [sys.executable, "-m", "scripts.gpu", "--runtime", runtime, "--only", *checks, "--rounds", "1"]
    command += ["--sizes-gb", "0.03", "0.04", "0.05", "--folder", str(tmp_path), "--json", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(found.read_text()), done.stdout


def test_the_checks_run_without_a_gpu(llama_server: str, tmp_path: Path) -> None:
    quick = [name for name in CHECKS if name not in SLOW]
    code, results, page = measured(tmp_path, *quick, runtime=llama_server)
    assert code == 0
    assert list(results) == quick
    states = [event.get("state") for _, event in results["out-of-memory"]["events"]]
    assert "ready" in states
    gone = [row["process_gone_s"] for row in results["ends"]["rows"] if "process_gone_s" in row]
    assert len(gone) == 2
    assert None not in gone
    assert [row["problem"] for row in results["swap"]["rows"]] == [""] * 6
    assert "| SIGKILL to llama-server |" in page


def test_a_check_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "llama-server")
    code, results, page = measured(tmp_path, "loading", "machine", runtime=missing)
    assert code == 1
    assert "event did not come" in results["loading"]["problem"]
    assert results["machine"]["cpu"]
    assert "Not measured: RuntimeError" in page


def test_the_report_leaves_out_no_check() -> None:
    page = report({name: {"problem": "left out"} for name in CHECKS})
    assert page.count("Not measured: left out") == len(CHECKS)
