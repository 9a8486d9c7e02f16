"""A child that writes 200 MB into its log: llamasup reads all of it and keeps little (S19)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import llamasup
from tests.kit.patience import eventually

LOG_BYTES = 200_000_000
KEPT_BYTES = 3 * 10_000_000  # the log and two older ones


def has_read(process: psutil.Process, size: int) -> bool:
    return process.io_counters().read_chars >= size


def is_rotated(folder: Path) -> bool:
    return len(list(folder.rglob("*.log*"))) == 3


@pytest.mark.timeout(1200)
def test_large_log_is_read_whole_and_bounded_on_disk_and_in_memory(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    """The fake server is ready only after it has written every byte."""
    with llamasup(tiny_model, "--runtime", fake_server(f"log_bytes={LOG_BYTES}")) as running:
        supervisor = psutil.Process(running.pid)
        for wanted in range(LOG_BYTES // 20, LOG_BYTES + 1, LOG_BYTES // 20):
            eventually(partial(has_read, supervisor, wanted))
        running.wait_for("ready")
        eventually(partial(is_rotated, own_folders / "state"))  # it may be about to rename them
        files = sorted((own_folders / "state").rglob("*.log*"))
        assert KEPT_BYTES / 2 < sum(path.stat().st_size for path in files) <= KEPT_BYTES
        assert supervisor.memory_info().rss < 150_000_000
        answer = httpx.post(f"{running.url}/completion", json={"prompt": "x"}, timeout=60)
        assert answer.status_code == 200
        assert running.stop() == 0
