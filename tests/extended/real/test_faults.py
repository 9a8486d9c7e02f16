"""The fault matrix of docs/measurements.md as tests: they check counts, not times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extended.real.fault_cases import CASES, Case, UnsupportedFault
from tests.extended.real.fault_clients import Ending
from tests.extended.real.fault_testbed import FaultTestbed
from tests.extended.real.flood import flooded_over_quiet


@pytest.fixture(scope="module")
def testbed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f")  # short: sockets lie below it


@pytest.fixture
def testbed(runtime: str, tiny_model: Path, testbed_folder: Path) -> FaultTestbed:
    folder = testbed_folder / str(sum(1 for _ in testbed_folder.iterdir()))
    folder.mkdir()
    return FaultTestbed(runtime, folder, tiny_model)


@pytest.mark.parametrize(
    ("runtime", "case"),
    [pytest.param(runtime, case, id=f"{runtime}-{case.name}") for case in CASES for runtime in case.runtimes],
    indirect=["runtime"],
)
def test_fault_loses_no_unanswered_request_and_leaves_nothing_behind(
    case: Case, testbed: FaultTestbed
) -> None:
    try:
        outcome = case.run(testbed)
    except UnsupportedFault as why:
        pytest.skip(str(why))
    assert outcome.left == ()
    assert outcome.endings
    if not case.ends_llamasup:
        assert outcome.count(Ending.LOST) == 0, outcome.detail
        assert outcome.count(Ending.CUT) == 0, outcome.detail
    if "mid-stream" in case.name and not case.ends_llamasup:
        assert outcome.count(Ending.ERROR_EVENT) > 0, outcome.detail  # it was in mid-stream indeed
    if "prefill" in case.name:
        assert outcome.count(Ending.ANSWERED) == len(outcome.endings), outcome.detail


def test_requests_are_answered_during_a_million_log_lines_per_minute(
    testbed: FaultTestbed,
) -> None:
    """S19. Prints how much slower the requests are. scripts/chaos/faults.py judges it on an idle machine."""
    seen = flooded_over_quiet(testbed, rounds=10, requests=30)
    assert len(seen) == 10
    print(", ".join(f"{flooded_s / quiet_s:.2f}" for quiet_s, flooded_s in seen))
