"""The verdicts of the stress test of many models, and the configs that it writes (tests/real/stress_*.py)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from llamasup.errors import ConfigInvalid
from tests.extended.soak.soak_wire import Answer
from tests.extended.soak.stress_config import BROKEN, StressConfig, edited
from tests.extended.soak.stress_expectations import Expectations, Request, Verdict
from tests.extended.soak.stress_models import PROMPTS, Answers, Version
from tests.kit.configs import load

OLD, NEW, OTHER = Version("m0", 0), Version("m0", 1), Version("m1", 0)
PROMPT = PROMPTS[0]
ANSWERS = Answers({(version, PROMPT): version.words[:4] for version in (OLD, NEW, OTHER)})
ERROR = b'data: {"error":{"message":"it died"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def expectations() -> Expectations:
    """The file of m0 is replaced at 10 s, applied by 20 s. m1 is removed at 30 s, applied by 40 s."""
    expectations = Expectations(ANSWERS)
    expectations.config_written({"m0": "m0", "alias": "m0", "m1": "m1"}, 0.0)
    expectations.file_written(OLD, 0.0)
    expectations.file_written(OTHER, 0.0)
    expectations.file_written(NEW, 10.0)
    expectations.file_applied("m0", 2, 20.0)
    expectations.config_written({"m0": "m0"}, 30.0)
    expectations.config_applied(40.0)
    return expectations


def request_of(name: str, sent_s: float, *, is_stream: bool = False) -> Request:
    return Request(name, PROMPT, 4, is_stream, sent_s)


def plain(version: Version, words: int = 4) -> Answer:
    text = " ".join(version.words[:words])
    return Answer(200, {}, bytearray(b'{"choices":[{"text":"%b"}]}' % text.encode()), whole=True)


def stream(version: Version, words: int, end: bytes, *, whole: bool) -> Answer:
    body = b"".join(
        b'data: {"choices":[{"text":" %b"}]}\n\n' % word.encode() for word in version.words[:words]
    )
    return Answer(200, {"content-type": "text/event-stream"}, bytearray(body + end), whole)


def refused(status: int, cause: str, **headers: str) -> Answer:
    body = b'{"error":{"message":"no","cause":"%b"}}' % cause.encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, named, bytearray(body), whole=True)


@pytest.mark.parametrize(
    ("name", "sent_s", "version", "verdict"),
    [
        ("m0", 5.0, OLD, Verdict.RIGHT),
        ("m0", 5.0, NEW, Verdict.WRONG),  # not written yet
        ("m0", 15.0, OLD, Verdict.RIGHT),
        ("alias", 15.0, NEW, Verdict.RIGHT),
        ("m0", 25.0, OLD, Verdict.WRONG),  # from the replaced file
        ("m0", 25.0, NEW, Verdict.RIGHT),
        ("m0", 25.0, OTHER, Verdict.WRONG),
        ("m1", 35.0, OTHER, Verdict.RIGHT),
        ("m1", 45.0, OTHER, Verdict.WRONG),  # removed
        ("alias", 45.0, NEW, Verdict.WRONG),
    ],
)
def test_answer_must_come_from_the_model_and_file_served_at_that_time(
    expectations: Expectations, name: str, sent_s: float, version: Version, verdict: Verdict
) -> None:
    assert expectations.judge(request_of(name, sent_s), plain(version), sent_s + 1.0).verdict is verdict


@pytest.mark.parametrize(
    ("sent_s", "verdict"), [(25.0, Verdict.WRONG), (35.0, Verdict.UNKNOWN), (45.0, Verdict.UNKNOWN)]
)
def test_404_is_right_once_the_model_may_be_removed(
    expectations: Expectations, sent_s: float, verdict: Verdict
) -> None:
    answer = refused(404, "model_not_found")
    assert expectations.judge(request_of("m1", sent_s), answer, sent_s + 1.0).verdict is verdict


@pytest.mark.parametrize(
    ("words", "end", "whole", "is_hurt", "verdict"),
    [
        (4, DONE, True, False, Verdict.RIGHT),
        (3, DONE, True, False, Verdict.WRONG),  # one word is missing
        (4, b"", True, False, Verdict.WRONG),  # ends like a complete stream, but is incomplete
        (3, b"", False, True, Verdict.WRONG),  # cut without an error event
        (3, ERROR, True, True, Verdict.WRONG),
        (3, ERROR, False, True, Verdict.CUT),
        (3, ERROR, False, False, Verdict.WRONG),  # without a fault
    ],
)
def test_stream_must_be_complete_or_end_with_an_error_event_after_a_fault(
    expectations: Expectations, words: int, end: bytes, whole: bool, is_hurt: bool, verdict: Verdict
) -> None:
    if is_hurt:
        expectations.fault_ended(expectations.fault_began("m0", 24.5, is_kill=True), 25.5)
    answer = stream(NEW, words, end, whole=whole)
    assert expectations.judge(request_of("m0", 25.0, is_stream=True), answer, 26.0).verdict is verdict


@pytest.mark.parametrize(
    ("kills", "headers", "verdict"),
    [
        (0, {"retry_after": "1"}, Verdict.WRONG),
        (1, {"retry_after": "1"}, Verdict.WRONG),  # llamasup sends the request again
        (2, {"retry_after": "1"}, Verdict.UNAVAILABLE),
        (2, {}, Verdict.WRONG),
    ],
)
def test_503_is_right_only_after_two_kills_and_with_retry_after(
    expectations: Expectations, kills: int, headers: dict[str, str], verdict: Verdict
) -> None:
    for number in range(kills):
        expectations.fault_ended(
            expectations.fault_began("m0", 25.1 + number / 10, is_kill=True), 25.2 + number / 10
        )
    assert (
        expectations.judge(request_of("m0", 25.0), refused(503, "killed", **headers), 26.0).verdict is verdict
    )


def test_answer_without_an_end_is_wrong(expectations: Expectations) -> None:
    assert expectations.judge(request_of("m0", 1.0), Answer(timed_out=True), 121.0).verdict is Verdict.WRONG


def test_edited_configs_are_valid_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    def texts(seed: int) -> list[str]:
        rng, config = random.Random(seed), StressConfig.first(tmp_path, 1 << 30)
        found = []
        for _ in range(60):
            _, config = edited(config, rng)
            found.append(config.text())
        return found

    assert texts(1) == texts(1) != texts(2)
    (tmp_path / "keys").write_text("key\n")
    for text in texts(3):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        load(path, {})


@pytest.mark.parametrize("text", [text for text in BROKEN if "missing" not in text])
def test_broken_config_is_refused_before_its_files_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigInvalid):
        load(path, {})
