"""What the profiles mean, as far as it is more than a number."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.profiles import preferences
from tests.core.planning import BUILDS, NEW, bert, capabilities, planned, value

# What the model cannot be reached, named or served without.
ESSENTIAL = {"--model", "--alias", "--host", "--port"}


def flags(argv: tuple[str, ...]) -> set[str]:
    return {word for word in argv[1:] if word.startswith("--")}


@pytest.mark.parametrize("build", BUILDS)
def test_plain_passes_the_model_its_address_and_nothing_else(build: str) -> None:
    made = planned(build, profile="plain")
    assert flags(made.argv) - {"--api-key-file"} <= ESSENTIAL


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ({"ctx_size": 4096}, {"--ctx-size": "16384"}),
        ({"parallel": 2}, {"--parallel": "2"}),
        ({"threads": 3}, {"--threads": "3"}),
        (
            {"kv_type": "q8_0", "flash_attn": "on"},
            {"--cache-type-k": "q8_0", "--cache-type-v": "q8_0", "--flash-attn": "on"},
        ),
        ({"gpu_layers": 0}, {"--gpu-layers": "0"}),
    ],
)
def test_plain_passes_what_was_asked_for(asked: dict[str, Any], passed: dict[str, str]) -> None:
    made = planned(profile="plain", **asked)
    assert flags(made.argv) - ESSENTIAL == set(passed)
    assert all(value(made, flag) == given for flag, given in passed.items())


def test_plain_passes_what_is_after_the_dashes() -> None:
    assert planned(profile="plain", extra=("--temp", "0.5", "-c", "512")).argv[-4:] == (
        "--temp",
        "0.5",
        "-c",
        "512",
    )


def test_plain_still_says_what_an_embedding_model_is() -> None:
    assert "--embedding" in planned(facts=bert(), profile="plain").argv


def test_plain_gives_a_reason_for_everything_that_it_leaves_out() -> None:
    made = planned(profile="plain")
    left_out = {each.flag for each in made.reasons if not each.passed}
    assert {"--threads", "--ctx-size", "--flash-attn", "--cache-ram"} <= left_out
    assert all(each.reason for each in made.reasons)


def test_latency_is_for_one_request_and_throughput_for_many() -> None:
    latency, usual, throughput = (planned(profile=name).parallel for name in ("latency", None, "throughput"))
    assert latency == 1
    assert latency < throughput
    assert usual <= throughput


def test_memory_takes_least_and_keeps_nothing_that_it_does_not_need() -> None:
    lean = planned(profile="memory")
    for other in (None, "latency", "throughput"):
        assert lean.memory.total_bytes < planned(profile=other).memory.total_bytes
    assert lean.memory.prompt_cache_bytes == 0
    assert not {"--mlock", "--load-mode"} & flags(planned(capabilities(NEW), profile="memory").argv)


def test_no_profile_overrides_what_was_asked_for() -> None:
    for profile in ("latency", "throughput", "memory", "plain"):
        made = planned(profile=profile, ctx_size=3000, parallel=3, kv_type="f16", threads=2)
        assert (made.ctx_size_of_slot, made.parallel, made.kv_type) == (3000, 3, "f16")
        assert value(made, "--threads") == "2"


def test_an_unset_profile_has_preferences_of_its_own() -> None:
    assert preferences(None) == preferences("plain")
