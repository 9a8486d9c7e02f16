from __future__ import annotations

import pytest

from llamasup.core.control.selection import Discovered, Running, Unresponsive, select_running
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, Stopping, UsageInvalid

ONE = Running(11, "http://127.0.0.1:8080", "1", ("tiny (ready)",), "/run/11/control.sock")
TWO = Running(
    12, "http://127.0.0.1:8081", "1", tuple(f"m{number} (ready)" for number in range(6)), "/run/12/c"
)
EMPTY = Running(13, "http://127.0.0.1:8082", "1", (), "/run/13/control.sock")


def test_only_running_llamasup_is_selected() -> None:
    beside = (Unresponsive(20, "starting"), Unresponsive(21, "stopping"))
    assert select_running(Discovered((ONE,), beside, ("qwen",)), None) is ONE


def test_several_llamasups_are_listed_to_choose_from() -> None:
    with pytest.raises(UsageInvalid, match="Four llamasup processes are running:") as raised:
        select_running(Discovered((ONE, TWO, EMPTY), (Unresponsive(20, "hangs"),)), None)
    assert raised.value.details == (
        "--pid 11  http://127.0.0.1:8080  tiny (ready)",
        "--pid 12  http://127.0.0.1:8081  m0 (ready), m1 (ready), m2 (ready), m3 (ready) and 2 more",
        "--pid 13  http://127.0.0.1:8082  no models",
        "--pid 20  does not answer",
    )
    assert select_running(Discovered((ONE, TWO)), 12) is TWO


def test_hanging_llamasup_makes_the_selection_ambiguous() -> None:
    with pytest.raises(UsageInvalid, match="Two llamasup"):
        select_running(Discovered((ONE,), (Unresponsive(20, "hangs"),)), None)


@pytest.mark.parametrize("pid", [None, 20])
@pytest.mark.parametrize(
    ("silent", "error", "says"),
    [
        (Unresponsive(20, "starting"), NotRunning, "still starting"),
        (Unresponsive(20, "stopping"), Stopping, "is stopping"),
        (Unresponsive(20, "hangs"), ControlFailed, "does not answer"),
    ],
)
def test_unresponsive_llamasup_is_reported_with_its_reason(
    silent: Unresponsive, error: type[LlamasupError], says: str, pid: int | None
) -> None:
    with pytest.raises(error, match=says) as raised:
        select_running(Discovered((), (silent,)), pid)
    assert "process 20" in raised.value.message


def test_no_llamasup_is_an_error_that_lists_closed_services() -> None:
    with pytest.raises(NotRunning, match="No llamasup is running on this machine for this user") as raised:
        select_running(Discovered(), None)
    assert "sudo" not in raised.value.remedy
    with pytest.raises(NotRunning) as raised:
        select_running(Discovered(closed=("qwen", "embed")), None)
    assert "Only root can access these services: qwen, embed; use sudo." in raised.value.remedy


def test_wrong_pid_is_an_error_that_lists_the_running_ones() -> None:
    with pytest.raises(NotRunning, match="process ID 99") as raised:
        select_running(Discovered((ONE,)), 99)
    assert raised.value.details == (ONE.shown,)
    with pytest.raises(NotRunning, match="process ID 99") as raised:
        select_running(Discovered(unresponsive=(Unresponsive(20, "starting"),)), 99)
    assert raised.value.details == ()
