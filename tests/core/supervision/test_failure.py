from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.supervision.failure import failure_of, lacks_memory
from llamasup.core.supervision.states import Instance, State
from llamasup.errors import DoesNotFit, GaveUp, LlamasupError, ServerFailed


def failed(*, deterministic: bool) -> Instance:
    diagnosis = Diagnosis(
        "flag_unknown", "It does not know --x.", "Leave it out.", ("E x",), deterministic, 2
    )
    return Instance(state=State.FAILED, last=diagnosis, crashes=((1.0, 1), (2.0, 2), (3.0, 3)))


def test_deterministic_failure_has_its_own_or_the_childs_exit_code() -> None:
    error = failure_of(failed(deterministic=True))
    assert isinstance(error, ServerFailed)
    assert (error.cause, error.exit_code, error.message) == ("flag_unknown", 2, "It does not know --x.")
    assert (error.remedy, error.lines) == ("Leave it out.", ("E x",))
    assert failure_of(failed(deterministic=True), 139).exit_code == 139


def test_crash_loop_error_quotes_the_last_crash() -> None:
    error = failure_of(failed(deterministic=False))
    assert isinstance(error, GaveUp)
    assert error.message == "Gave up after 3 crashes of llama-server. The last one: It does not know --x."
    error = failure_of(replace(failed(deterministic=False), crashes=((3.0, 3),)))
    assert error.message.startswith("Gave up after 1 crash of llama-server.")


@pytest.mark.parametrize(
    ("log", "remedy"),
    [(None, "See its log (llamasup logs)."), (Path("/s/m.log"), f"See its log ({Path('/s/m.log')}).")],
)
def test_log_is_named_by_its_file_when_llamasup_ends(log: Path | None, remedy: str) -> None:
    last = Diagnosis("unknown", "It ended.", "See its log (llamasup logs).", (), False, 75)
    for instance in (Instance(state=State.FAILED), Instance(state=State.FAILED, last=last)):
        assert failure_of(instance, log=log).remedy == remedy


def test_failure_without_diagnosis_has_a_message() -> None:
    assert failure_of(Instance(state=State.FAILED)).message == "llama-server failed for an unknown reason."


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (DoesNotFit("It does not fit."), True),
        (ServerFailed("It does not fit.", cause="does_not_fit", exit_code=71), True),
        (ServerFailed("No memory.", cause="out_of_memory_device", exit_code=71), True),
        (ServerFailed("No such flag.", cause="flag_unknown", exit_code=2), False),
        (GaveUp("It crashed too often."), False),
    ],
)
def test_lacks_memory_covers_all_memory_causes(error: LlamasupError, *, lacks: bool) -> None:
    assert lacks_memory(error) is lacks
