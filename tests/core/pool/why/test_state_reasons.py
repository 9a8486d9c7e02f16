"""Explanations of models, one for each state and each reason."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.pool.model_info import ModelInfo
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.pool.why import recording
from llamasup.core.pool.why.recording import Decision, of_event
from llamasup.core.pool.why.state_reasons import Explanation, explain
from llamasup.core.supervision.events import LoadFailed, ModelUnloading, ServerExited
from llamasup.core.supervision.states import State
from llamasup.errors import DoesNotFit
from tests.core.pool.why import samples
from tests.core.pool.why.samples import KILLED, LACKS_MEMORY, NOON, TWO_SLOTS

MORE_MEMORY = "Allow more memory (memory in the config), or make the models smaller (ctx_size, parallel)."
LOADS = "A request for it, or `llamasup load qwen`, loads it."

NO_STAY = Stay()


def before(seconds: float) -> datetime:
    return NOON - timedelta(seconds=seconds)


def explained(state: str, *decisions: Decision | None, stay: Stay = NO_STAY, **facts: Any) -> Explanation:
    """``decisions``: the newest first."""
    found = [decision for decision in decisions if decision is not None]
    spec = ModelSpec("qwen", "/qwen.gguf", stay=stay)
    return explain(ModelInfo(spec, ShownState(state), **facts), found, NOON)


def sentences(state: str, *decisions: Decision | None, **facts: Any) -> Sequence[str]:
    return explained(state, *decisions, **facts).sentences


LOADED = samples.loaded(before(180), "qwen", "request")
CRASHED = of_event(ServerExited("qwen", 1, None, KILLED, 0.0), before(60), {})
GIVEN_UP = of_event(ServerExited("qwen", 1, None, KILLED, None), before(60), {})
EVICTED = of_event(ModelUnloading("qwen", "memory", "gemma"), before(5), {"gemma": LACKS_MEMORY})
UNLOADED = of_event(ModelUnloading("qwen", "asked"), before(5), {})


# --- loaded


def test_loaded_model_says_when_and_why() -> None:
    found = explained("ready", LOADED)
    assert found == Explanation(("qwen was loaded 3 minutes ago because a request asked for it.",))


def test_loaded_model_without_a_recorded_load_is_loaded() -> None:
    assert explained("ready") == Explanation(("qwen is loaded.",))


def test_restart_after_a_crash_follows_the_load_with_its_remedy() -> None:
    found = explained("ready", CRASHED, LOADED)
    assert found.sentences == (
        "qwen was loaded 3 minutes ago because a request asked for it.",
        "qwen was restarted 1 minute ago: llama-server was killed (SIGKILL).",
    )
    assert found.change == ("Check dmesg.",)


def test_only_the_last_restart_since_the_load_counts() -> None:
    restarted = recording.restarted(before(1), "qwen")
    earlier = of_event(ServerExited("qwen", 1, None, KILLED, 0.0), before(400), {})
    found = explained("ready", restarted, CRASHED, LOADED, earlier)
    assert found.sentences[1:] == ("qwen was restarted 1 second ago because a command asked for it.",)
    assert found.change == ()


def test_load_before_an_unload_is_not_the_reason() -> None:
    assert sentences("ready", UNLOADED, LOADED) == ("qwen is loaded.",)


def test_update_of_a_loaded_model_is_named() -> None:
    updated = recording.updated(before(2), "qwen")
    smaller = recording.reduced(before(3), "qwen", [TWO_SLOTS])
    assert sentences("ready", updated, smaller, LOADED)[-1] == (
        "qwen was updated 2 seconds ago because its file or its settings have changed."
    )


def test_smaller_plan_names_its_reason_and_what_would_change_it() -> None:
    found = explained("ready", LOADED, reduced=(TWO_SLOTS,))
    assert found.sentences[-1] == (
        "It has 2 slots instead of 4, because the larger plan does not fit in memory."
    )
    assert found.change[0] == MORE_MEMORY


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"stay": Stay(pin=True)}, "It is pinned: it is not evicted for another model."),
        ({"unload_in_s": 90.0}, "It is unloaded in 1 minute if no request uses it (ttl)."),
    ],
)
def test_loaded_model_says_how_long_it_stays(facts: Any, sentence: str) -> None:
    assert sentences("ready", LOADED, **facts)[-1] == sentence


# --- the queue


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"queued": 1, "slots": 1}, "1 request waits because its only slot is busy."),
        ({"queued": 3, "slots": 4}, "3 requests wait because all 4 slots are busy."),
        ({"queued": 2}, "2 requests wait because all slots are busy."),
        ({"queued": 1, "slots": 4, "max_concurrent": 1}, "1 request waits because max_concurrent is 1."),
        ({"queued": 1, "slots": 1, "max_concurrent": 4}, "1 request waits because its only slot is busy."),
    ],
)
def test_queue_of_a_loaded_model_waits_for_slots(facts: Any, sentence: str) -> None:
    found = explained("ready", LOADED, **facts)
    assert found.sentences[-1] == sentence
    assert found.change[-1].startswith("More requests run at a time")


def test_queue_of_a_model_that_does_not_serve_waits_for_it() -> None:
    assert sentences("loading", LOADED, queued=1)[-1] == "1 request waits for it."


# --- on the way


def test_model_that_waits_for_memory_names_the_models_that_hold_it() -> None:
    found = explained("waiting", waits=LACKS_MEMORY, overdue_in_s=4.0)
    assert found.sentences == (
        "qwen was asked for, and waits because it needs 5.0 GiB of ram, of which 2.0 GiB is free; "
        "big must be unloaded first.",
        "Models in use stay loaded for 4 seconds more. Then they finish their requests first.",
    )
    assert found.change == ("Unload big.", MORE_MEMORY)


@pytest.mark.parametrize(
    ("waits", "overdue_in_s"), [(LACKS_MEMORY, None), (replace(LACKS_MEMORY, chosen=()), 4.0)]
)
def test_overdue_wait_has_no_time_left(waits: Any, overdue_in_s: float | None) -> None:
    assert len(sentences("waiting", waits=waits, overdue_in_s=overdue_in_s)) == 1


def test_model_is_asked_for_before_its_memory_is_known() -> None:
    assert sentences("waiting") == (
        "qwen was asked for. llamasup first reads its file, or loads other models.",
    )


def test_download_shows_its_progress() -> None:
    assert sentences("downloading", download="1 GiB of 4 GiB") == (
        "qwen was asked for, and its file is missing.",
        "1 GiB of 4 GiB.",
    )
    assert len(sentences("downloading")) == 1


@pytest.mark.parametrize("state", ["starting", "loading", "warming"])
def test_load_under_way_has_its_reason(state: str) -> None:
    assert sentences(state, LOADED) == (
        "qwen was loaded 3 minutes ago because a request asked for it.",
        "qwen does not serve yet: its llama-server starts.",
    )


@pytest.mark.parametrize(
    ("decision", "in_flight", "first", "last"),
    [
        (
            samples.closed(NOON, "qwen", "gemma", None),
            2,
            "qwen gets no new requests because gemma needs its memory. It finishes 2 requests first.",
            "qwen gets no new requests because gemma needs its memory. It finishes 2 requests first.",
        ),
        (
            UNLOADED,
            1,
            "qwen was unloaded 5 seconds ago because a command asked for it.",
            "Its llama-server is ending. It finishes 1 request first.",
        ),
        (None, 0, "The llama-server of qwen is ending.", "The llama-server of qwen is ending."),
        (
            samples.opened(NOON, "qwen"),
            0,
            "The llama-server of qwen is ending.",
            "The llama-server of qwen is ending.",
        ),
    ],
)
def test_model_that_is_ending_says_why(
    decision: Decision | None, in_flight: int, first: str, last: str
) -> None:
    found = sentences("draining", decision, in_flight=in_flight)
    assert (found[0], found[-1]) == (first, last)


# --- not loaded


def test_crashed_model_says_when_it_starts_again() -> None:
    found = explained("backoff", CRASHED, LOADED, restart_in_s=8.0)
    assert found.sentences == (
        "The llama-server of qwen ended 1 minute ago: llama-server was killed (SIGKILL).",
        "qwen starts again in 8 seconds. The delay grows with each crash.",
    )
    assert found.change == ("Check dmesg.", "`llamasup restart qwen` starts it now.")


def test_crashed_model_without_a_recorded_crash_starts_again_soon() -> None:
    found = explained("backoff")
    assert found.sentences == ("qwen starts again soon. The delay grows with each crash.",)
    assert found.change == ("`llamasup restart qwen` starts it now.",)


def test_refused_model_has_the_reason_and_the_remedy() -> None:
    found = explained("failed", problem="It needs too much.", remedy="Buy memory.", retry_in_s=300.0)
    assert found.sentences == (
        "qwen cannot be loaded: It needs too much.",
        "A request tries it again in 5 minutes.",
    )
    assert found.change == ("Buy memory.", "`llamasup load qwen` tries it now.")


def test_model_that_gave_up_has_the_last_diagnosis() -> None:
    found = explained("failed", GIVEN_UP)
    assert found.sentences == ("qwen was given up 1 minute ago: llama-server was killed (SIGKILL).",)
    assert found.change == ("Check dmesg.", "`llamasup load qwen` tries it now.")


def test_broken_model_has_no_retry() -> None:
    assert explained("broken", problem="no magic", remedy="Download it again") == Explanation(
        ("qwen cannot be loaded: no magic.",), ("Download it again.",)
    )


def test_failed_model_without_any_reason_cannot_be_loaded() -> None:
    assert sentences("failed") == ("qwen cannot be loaded.",)


def test_model_that_was_never_loaded_says_how_to_load_it() -> None:
    assert explained("stopped") == Explanation(("qwen is not loaded: nothing has asked for it.",), (LOADS,))


def test_evicted_model_names_the_model_that_got_its_memory() -> None:
    found = explained("stopped", EVICTED, LOADED)
    assert found.sentences == (
        "qwen is not loaded.",
        "qwen was evicted 5 seconds ago because gemma needs 5.0 GiB of ram, of which 2.0 GiB is free.",
    )
    assert found.change == (LOADS, "To keep it loaded, pin it (pin: true).", MORE_MEMORY)


def test_refusal_of_an_earlier_load_is_the_reason() -> None:
    refused = of_event(LoadFailed("qwen", DoesNotFit("It is too large.")), before(5), {})
    assert sentences("stopped", refused)[1] == "qwen was refused 5 seconds ago: It is too large."


def test_requests_do_not_load_a_model_that_a_command_unloaded_under_run() -> None:
    found = explained("stopped", UNLOADED, stay=Stay(by_command=True))
    assert found.change == ("`llamasup load qwen` loads it.",)


# --- words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "just now"),
        (1, "1 second ago"),
        (59.4, "59 seconds ago"),
        (60, "1 minute ago"),
        (7_300, "2 hours ago"),
        (200_000, "2 days ago"),
        (86_400 * 1_500, "1,500 days ago"),
    ],
)
def test_time_of_a_decision_is_in_its_largest_unit(seconds: float, text: str) -> None:
    loaded = samples.loaded(before(seconds), "qwen", "request")
    assert sentences("ready", loaded) == (f"qwen was loaded {text} because a request asked for it.",)


def test_each_state_has_an_explanation() -> None:
    states = ["waiting", "downloading", "broken", *(state.value for state in State)]
    for state in states:
        for decision in (None, LOADED, CRASHED, EVICTED, UNLOADED, GIVEN_UP):
            assert all(each.endswith(".") for each in sentences(state, decision))
