"""The table in docs/observability.md is made of what /metrics has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

DOC = ROOT / "docs" / "observability.md"


def write(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "metrics_table.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_table_is_current() -> None:
    done = write("--check")
    assert done.returncode == 0, done.stderr


def test_stale_table_is_detected_and_rewritten(tmp_path: Path) -> None:
    stale = tmp_path / "observability.md"
    stale.write_text(
        DOC.read_text("utf-8").replace("| `llamasup_replays_total`", "| `llamasup_reruns_total`")
    )
    done = write("--check", "--doc", str(stale))
    assert (done.returncode, "is stale" in done.stderr) == (1, True)
    assert write("--doc", str(stale)).returncode == 0
    assert stale.read_text("utf-8") == DOC.read_text("utf-8")
