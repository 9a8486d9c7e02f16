"""Heads and chunks that are nearly right: what becomes of them, beside what h11 makes of them (X9).

``scripts/chaos/fuzz http`` runs the same for as long as it is told.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamasup.core.proxy import ProxyConfig
from tests.security.circuit import Circuit
from tests.security.grammar import (
    bodiless_responses,
    cut,
    repeated_requests,
    repeated_responses,
    requests,
    responses,
)
from tests.security.reference import differences
from tests.security.response_reference import misread

_FEW = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def circuit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Circuit]:
    made = Circuit(tmp_path_factory.mktemp("circuit"), ProxyConfig())
    yield made
    made.close()


def as_h11_reads(circuit: Circuit, *reads: bytes) -> None:
    outcome = circuit.send(reads)
    wrong = differences(b"".join(reads), outcome, circuit.records) + circuit.malformed
    assert wrong == [], wrong


def the_same_in_pieces(circuit: Circuit, raw: bytes, pieces: list[bytes]) -> None:
    """But for what is refused before its body is there: the body is not judged, and the connection ends."""
    whole = circuit.send([raw])
    of_whole = _told(circuit)
    for split in (pieces, [raw[at : at + 1] for at in range(len(raw))]):
        outcome = circuit.send(split)
        records = _told(circuit)
        assert records == of_whole[: len(records)]
        assert outcome.asked == whole.asked[: len(outcome.asked)]
        if len(records) < len(of_whole):
            assert outcome.closed
            assert records[-1][0] == "refused"
        else:
            assert outcome.asked == whole.asked
            assert outcome.closed == whole.closed or records[-1][0] == "refused"


def _told(circuit: Circuit) -> list[tuple[str, int, str]]:
    return [
        (record.outcome, 0 if record.outcome == "refused" else record.status, record.path)
        for record in circuit.records
    ]


def answered_whole_or_not(circuit: Circuit, raw: bytes, method: bytes, *, closes: bool) -> None:
    request = method + b" /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    outcome = circuit.send([request], answer=lambda _: raw, closing=closes)
    wrong = misread(raw, method, outcome, circuit.records, closes=closes)
    assert wrong == [], wrong


def the_next_is_right(circuit: Circuit, method: bytes, early: bytes, late: bytes, *, idle: bool) -> None:
    _, second = circuit.send_two(method, early, late, idle=idle)
    assert second.told.startswith(b"HTTP/1.1 200 OK\r\n"), second.told
    assert second.told.endswith(b"\r\n\r\n1"), second.told


@pytest.mark.check("X9")
@_FEW
@given(raw=requests())
def test_requests_that_are_nearly_right_are_read_as_h11_reads_them(circuit: Circuit, raw: bytes) -> None:
    as_h11_reads(circuit, raw)


@pytest.mark.check("X7")
@pytest.mark.parametrize("path", [b"/v1/%63ompletions", b"/tools", b"/%74ools"])
def test_refusal_of_a_path_has_a_known_reason(circuit: Circuit, path: bytes) -> None:
    as_h11_reads(circuit, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    (record,) = circuit.records
    assert record.outcome == "refused"


@pytest.mark.check("X9")
@_FEW
@given(reads=repeated_requests())
def test_requests_that_repeat_one_another_are_read_as_h11_reads_them(
    circuit: Circuit, reads: list[bytes]
) -> None:
    as_h11_reads(circuit, *reads)


@pytest.mark.check("X9")
@_FEW
@given(data=st.data())
def test_how_reads_cut_a_request_makes_no_difference(circuit: Circuit, data: st.DataObject) -> None:
    raw = data.draw(requests())
    the_same_in_pieces(circuit, raw, data.draw(cut(raw)))


@pytest.mark.check("X9")
@_FEW
@given(raw=responses(), method=st.sampled_from([b"GET", b"POST", b"HEAD"]), closes=st.booleans())
def test_responses_that_are_nearly_right_are_passed_on_whole_or_not_at_all(
    circuit: Circuit, raw: bytes, method: bytes, closes: bool
) -> None:
    answered_whole_or_not(circuit, raw, method, closes=closes)


@pytest.mark.check("X9")
@_FEW
@given(repeated=repeated_responses())
def test_responses_that_repeat_one_another_are_passed_on_whole_or_not_at_all(
    circuit: Circuit, repeated: list[bytes]
) -> None:
    for raw in repeated:
        answered_whole_or_not(circuit, raw, b"GET", closes=False)


@pytest.mark.check("X9")
@_FEW
@given(response=bodiless_responses(), idle=st.booleans())
def test_no_response_without_a_body_leaves_bytes_for_the_next_request(
    circuit: Circuit, response: tuple[bytes, bytes, bytes], idle: bool
) -> None:
    the_next_is_right(circuit, *response, idle=idle)
