"""``scripts/release --dry-run`` of a fresh clone makes what a release needs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

pytestmark = pytest.mark.one_runtime


def test_dry_run_of_a_fresh_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is not a git checkout")
    clone, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    command = ["scripts/release", "--dry-run", "--without-bundle", "--out", str(out)]
    env = {name: value for name, value in os.environ.items() if name != "LLAMASUP_VENV"}
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False, env=env)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().rpartition("\n")[2])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "two builds are equal" in done.stdout
    assert "the demo model is served" in done.stdout
    lines = (out / "SHA256SUMS").read_text("utf-8").splitlines()
    for line in lines:
        digest, name = line.split("  ", 1)
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    sbom = json.loads(next(out.glob("*.cdx.json")).read_text("utf-8"))
    assert {"llamasup", "httptools", "xllamacpp"} <= {
        item["name"] for item in [sbom["metadata"]["component"], *sbom["components"]]
    }
    refused = subprocess.run(
        [*command[:1], "--out", str(out)], cwd=clone, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "not ready" in refused.stderr
