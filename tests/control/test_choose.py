from __future__ import annotations

import pytest

from llamasup.control.choose import Found, Running, Silent, choose
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, Stopping, UsageInvalid

ONE = Running(11, "http://127.0.0.1:8080", "1", ("tiny (ready)",), "/run/11/control.sock")
TWO = Running(
    12, "http://127.0.0.1:8081", "1", tuple(f"m{number} (ready)" for number in range(6)), "/run/12/c"
)
EMPTY = Running(13, "http://127.0.0.1:8082", "1", (), "/run/13/control.sock")


def test_the_only_one_is_meant_whatever_comes_and_goes_beside_it() -> None:
    beside = (Silent(20, "starting"), Silent(21, "stopping"))
    assert choose(Found((ONE,), beside, ("qwen",)), None) is ONE


def test_of_several_one_must_be_chosen_and_all_are_listed() -> None:
    with pytest.raises(UsageInvalid, match="4 llamasups run here") as raised:
        choose(Found((ONE, TWO, EMPTY), (Silent(20, "hangs"),)), None)
    assert raised.value.details == (
        "--pid 11  http://127.0.0.1:8080  tiny (ready)",
        "--pid 12  http://127.0.0.1:8081  m0 (ready), m1 (ready), m2 (ready), m3 (ready) and 2 more",
        "--pid 13  http://127.0.0.1:8082  no models",
        "--pid 20  does not answer",
    )
    assert choose(Found((ONE, TWO)), 12) is TWO


def test_one_that_hangs_beside_the_only_one_that_answers_may_be_the_one_that_is_meant() -> None:
    with pytest.raises(UsageInvalid, match="2 llamasups"):
        choose(Found((ONE,), (Silent(20, "hangs"),)), None)


@pytest.mark.parametrize("pid", [None, 20])
@pytest.mark.parametrize(
    ("silent", "error", "says"),
    [
        (Silent(20, "starting"), NotRunning, "only just starting"),
        (Silent(20, "stopping"), Stopping, "is stopping"),
        (Silent(20, "hangs"), ControlFailed, "does not answer"),
    ],
)
def test_one_that_does_not_answer_says_why(
    silent: Silent, error: type[LlamasupError], says: str, pid: int | None
) -> None:
    with pytest.raises(error, match=says) as raised:
        choose(Found((), (silent,)), pid)
    assert "process 20" in raised.value.message


def test_where_none_runs_that_is_said_and_who_else_might_be_asked() -> None:
    with pytest.raises(NotRunning, match="No llamasup runs here") as raised:
        choose(Found(), None)
    assert "sudo" not in raised.value.remedy
    with pytest.raises(NotRunning) as raised:
        choose(Found(closed=("qwen", "embed")), None)
    assert "Only root may ask these services: qwen, embed; use sudo." in raised.value.remedy


def test_a_wrong_number_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(NotRunning, match="process number 99") as raised:
        choose(Found((ONE,)), 99)
    assert raised.value.details == (ONE.shown,)
    with pytest.raises(NotRunning, match="process number 99") as raised:
        choose(Found(silent=(Silent(20, "starting"),)), 99)
    assert raised.value.details == ()
