from __future__ import annotations

import pickle

from llamasup.errors import ERRORS, ConfigInvalid, ServerFailed

EXIT_CODES = {2, 65, 66, 69, 70, 71, 73, 75, 77, 78}  # docs/design.md, and 70 for a bug of llamasup


def test_every_error_has_exit_code_of_contract_status_and_cause() -> None:
    assert {error.exit_code for error in ERRORS} <= EXIT_CODES
    assert all(400 <= error.http_status < 600 for error in ERRORS)
    assert (
        len({error.cause for error in ERRORS}) >= len(ERRORS) - 1
    )  # ServerFailed has the cause of its diagnosis


def test_failed_server_has_cause_and_exit_code_of_its_diagnosis() -> None:
    error = ServerFailed("It ended.", cause="port_in_use", exit_code=71, remedy="Wait.", lines=("a",))
    assert (error.cause, error.exit_code, error.http_status) == ("port_in_use", 71, 503)
    assert (str(error), error.remedy, error.lines) == ("It ended.", "Wait.", ("a",))


def test_errors_survive_the_way_to_another_process() -> None:
    error = ServerFailed("It ended.", cause="port_in_use", exit_code=71, remedy="Wait.", lines=("a",))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), str(copy), vars(copy)) == (ServerFailed, "It ended.", vars(error))
    other = ConfigInvalid("a", remedy="b")
    assert vars(pickle.loads(pickle.dumps(other))) == vars(other)  # noqa: S301
