"""A model whose path is not UTF-8: what programs read is JSON to the strictest of them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.e2e.driver import llamasup, run_to_end

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="other systems keep file names in UTF-8"),
]


@pytest.fixture
def odd(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    shutil.copy(tiny_model, path)
    return path


def test_events_ready_file_and_log_are_json(
    odd: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    options = ("--runtime", fake_server(), "--ready-file", str(ready_file), "--log-format", "json")
    with llamasup(odd, *options) as running:
        ready = running.wait_for("ready")
        assert ready["models"] == ["caf\\xe9"]
        # msgspec refuses half a surrogate pair.
        assert msgspec.json.decode(ready_file.read_bytes())["models"] == ["caf\\xe9"]
        assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
        report = run_to_end("doctor", "--json", "--port", str(ready["port"]), *options[:2]).stdout
        assert (
            "serves caf\\xe9 (ready)"
            in {check["name"]: check["found"] for check in msgspec.json.decode(report.encode())["checks"]}[
                "port"
            ]
        )
        assert running.stop() == 0
    for line in running.stderr:
        msgspec.json.decode(line.encode())
