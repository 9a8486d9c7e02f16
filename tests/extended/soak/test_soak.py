"""A minute and a half of scripts/chaos/soak.py: mixed load on a server that is killed, stopped, restarted.

For the embedded runtime, run scripts/chaos/soak.py by hand (docs/measurements.md). Single faults:
test_faults.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extended.soak.soak import soak
from tests.extended.soak.soak_wire import Outcome

DURATION_S = 90.0


@pytest.mark.timeout(900)
def test_soak_loses_no_request_and_leaves_nothing_behind(
    llama_server: str, tiny_model: Path, own_folders: Path
) -> None:
    report = soak(llama_server, tiny_model, own_folders, duration_s=DURATION_S)
    print("\n".join(report.table()))
    assert report.violations == []
    assert report.count(Outcome.LOST) == 0
    # The faults cut some answers, and most requests were answered.
    assert report.count(Outcome.RIGHT) > report.count(Outcome.CUT) > 0
    assert {span.what for span in report.spans} == {"SIGKILL", "SIGSTOP", "restart (SIGHUP)"}
