"""A minute and a half of scripts/soak.py: mixed load on a real server that is killed, stopped and restarted.

The embedded runtime has its half hour by hand (docs/reliability.md); each fault alone is in test_faults.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.soak import soak
from tests.real.soak_wire import Outcome

DURATION_S = 90.0


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_soak_loses_no_request_and_leaves_nothing_behind(
    llama_server: str, tiny_model: Path, own_folders: Path
) -> None:
    report = soak(llama_server, tiny_model, own_folders, duration_s=DURATION_S)
    print("\n".join(report.table()))
    assert report.violations == []
    assert report.count(Outcome.LOST) == 0
    # It was hit in the middle of something, and answered most of what it was asked.
    assert report.count(Outcome.RIGHT) > report.count(Outcome.CUT) > 0
    assert {span.what for span in report.spans} == {"SIGKILL", "SIGSTOP", "restart (SIGHUP)"}
