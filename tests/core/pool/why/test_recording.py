"""The sentences of decisions, one for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.plan_limits import Change, Reduction
from llamasup.core.pool.cheapest_set import COUNT, Candidate, Resource
from llamasup.core.pool.eviction_policy import Action, Evict, Grounds, Reject, WakeAt
from llamasup.core.pool.why.recording import (
    Decision,
    LoadedBy,
    build_changed,
    of_action,
    of_event,
    reduced,
    reductions_change,
    reductions_text,
    restarted,
    updated,
    waiting,
    waiting_change,
    waiting_text,
)
from llamasup.core.supervision.events import (
    LoadFailed,
    ModelUnloading,
    PublishedEvent,
    ServerExited,
    StateChanged,
)
from llamasup.core.supervision.states import State
from llamasup.errors import DoesNotFit, GaveUp, ServerFailed
from tests.core.pool.why.samples import (
    BIG,
    GIB,
    KILLED,
    LACKS_MEMORY,
    NOON,
    RAM,
    SMALLER,
    TWO_SLOTS,
    closed,
    loaded,
    opened,
)

GROUP: Resource = ("group", "llama@CUDA0")
NEEDS_5_GIB = "qwen needs 5.0 GiB of ram, of which 2.0 GiB is free"


@pytest.mark.parametrize(
    ("by", "because"),
    [
        ("request", "a request asked for it"),
        ("command", "a command asked for it"),
        ("preload", "its settings say preload"),
        ("start", "llamasup was started for it"),
        ("update", "it was loaded before its file or its settings changed"),
    ],
)
def test_load_says_what_it_is_for(by: LoadedBy, because: str) -> None:
    assert loaded(NOON, "qwen", by).text == f"qwen is loaded because {because}."


@pytest.mark.parametrize("action", [Evict("a", "ttl"), Reject("a", "it is too large"), WakeAt(1.0)])
def test_actions_that_an_event_reports_are_recorded_with_it(action: Action) -> None:
    assert of_action(action, NOON, "request", {}) is None


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (
            closed(NOON, "big", "qwen", LACKS_MEMORY),
            f"big gets no new requests because {NEEDS_5_GIB}.",
        ),
        (closed(NOON, "big", "qwen", None), "big gets no new requests because qwen needs its memory."),
        (opened(NOON, "big"), "big gets requests again because its memory is no longer needed."),
        (restarted(NOON, "big"), "big is restarted because a command asked for it."),
        (updated(NOON, "big"), "big is updated because its file or its settings have changed."),
        (
            build_changed(NOON, "big", "upgrade", "/b2/llama-server", "it is as fast"),
            "big gets a new build of llama.cpp, /b2/llama-server, because it is as fast.",
        ),
        (
            build_changed(NOON, "big", "keep", "/b2/llama-server", "it is slow"),
            "big keeps its build of llama.cpp: /b2/llama-server is refused, because it is slow.",
        ),
        (
            build_changed(NOON, "big", "return", "/b1/llama-server", "it crashes"),
            "big returns to its old build of llama.cpp, /b1/llama-server, because it crashes.",
        ),
        (
            reduced(NOON, "big", [TWO_SLOTS]),
            "big is smaller than asked: "
            "it has 2 slots instead of 4, because the larger plan does not fit in memory.",
        ),
    ],
)
def test_decision_of_the_pool_has_a_sentence(decision: Decision, text: str) -> None:
    assert decision.text == text


# --- events


@pytest.mark.parametrize(
    ("event", "grounds", "kind", "text"),
    [
        (ModelUnloading("big", "memory", "qwen"), {"qwen": LACKS_MEMORY}, "evict", f"because {NEEDS_5_GIB}"),
        (ModelUnloading("big", "memory", "qwen"), {}, "evict", "because qwen needs its memory"),
        (
            ModelUnloading("big", "memory"),
            {"": Grounds({}, {}, {RAM: GIB, COUNT: 1}, (BIG,), 0.0)},
            "evict",
            "because the loaded models together exceed the budget by 1.0 GiB of ram and 1 model",
        ),
        (
            ModelUnloading("big", "memory"),
            {},
            "evict",
            "because the loaded models together exceed the budget",
        ),
        (
            ModelUnloading("big", "count", "qwen"),
            {"qwen": Grounds({COUNT: 1}, {COUNT: 0}, {COUNT: 1}, (BIG,), 0.0)},
            "evict",
            "because qwen needs a place, and max_loaded models are loaded",
        ),
        (
            ModelUnloading("big", "group", "qwen"),
            {"qwen": Grounds({GROUP: 1}, {GROUP: 0}, {GROUP: 1}, (BIG,), 0.0)},
            "evict",
            "because qwen is in the group llama, of which another model is loaded on CUDA0",
        ),
        (ModelUnloading("big", "ttl"), {}, "unload", "because no request used it during its ttl"),
        (ModelUnloading("big", "asked"), {}, "unload", "because a command asked for it"),
        (ModelUnloading("big", "removed"), {}, "unload", "because it is no longer served"),
    ],
)
def test_unload_has_its_reason(
    event: PublishedEvent, grounds: Mapping[str, Grounds], kind: str, text: str
) -> None:
    decision = of_event(event, NOON, grounds)
    assert decision is not None
    assert (decision.time, decision.model, decision.kind) == (NOON, "big", kind)
    assert decision.text == f"big is {'evicted' if kind == 'evict' else 'unloaded'} {text}."


def test_refusal_has_the_message_and_the_remedy_of_its_error() -> None:
    error = DoesNotFit("qwen does not fit: it needs 5 GiB, and 2 GiB are free.", remedy="Buy memory.")
    decision = of_event(LoadFailed("qwen", error), NOON, {})
    assert decision == Decision(
        NOON,
        "qwen",
        "refuse",
        ": qwen does not fit: it needs 5 GiB, and 2 GiB are free",
        ("Buy memory.",),
    )


@pytest.mark.parametrize(
    "event",
    [
        LoadFailed("qwen", GaveUp("Gave up after 6 crashes.")),
        LoadFailed("qwen", ServerFailed("It is truncated.", cause="model_corrupt", exit_code=65)),
        LoadFailed(None, DoesNotFit("It is too large.")),
    ],
    ids=["crash loop", "end of the server", "llamasup itself"],
)
def test_failure_that_the_exit_has_told_or_of_llamasup_itself_is_no_decision(event: LoadFailed) -> None:
    assert of_event(event, NOON, {}) is None


@pytest.mark.parametrize(
    ("event", "kind", "text"),
    [
        (
            ServerExited("qwen", 1, None, KILLED, 0.0),
            "restart",
            "qwen is restarted: llama-server was killed (SIGKILL).",
        ),
        (
            ServerExited("qwen", 1, None, replace(KILLED, adjustment=SMALLER), 0.0),
            "restart",
            "qwen is restarted: llama-server was killed (SIGKILL); "
            "now with --parallel 2 instead of 4 (step 1 of 3).",
        ),
        (
            ServerExited("qwen", 1, None, KILLED, None),
            "fail",
            "qwen is not restarted: llama-server was killed (SIGKILL).",
        ),
    ],
)
def test_end_of_a_server_has_its_diagnosis(event: PublishedEvent, kind: str, text: str) -> None:
    decision = of_event(event, NOON, {})
    assert decision is not None
    assert (decision.kind, decision.text, decision.change) == (kind, text, ("Check dmesg.",))


def test_end_without_a_remedy_has_nothing_to_change() -> None:
    decision = of_event(ServerExited("qwen", 1, None, replace(KILLED, remedy=""), 0.0), NOON, {})
    assert decision is not None
    assert decision.change == ()


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("memory", "memory in the config"),
        ("count", "max_loaded in the config"),
        ("group", "groups in the config"),
    ],
)
def test_evicted_model_names_the_setting_that_made_it_go(
    reason: Literal["memory", "count", "group"], remedy: str
) -> None:
    decision = of_event(ModelUnloading("big", reason, "qwen"), NOON, {})
    assert decision is not None
    assert remedy in decision.change[1]


@pytest.mark.parametrize("event", [StateChanged("a", State.READY, 1), ModelUnloading("a", "changed")])
def test_other_events_are_no_decisions(event: PublishedEvent) -> None:
    assert of_event(event, NOON, {}) is None


# --- a wait


@pytest.mark.parametrize(
    ("grounds", "text"),
    [
        (LACKS_MEMORY, "big must be unloaded first"),
        (replace(LACKS_MEMORY, lack={}), "models that are being unloaded free it"),
    ],
)
def test_wait_names_what_is_missing_and_the_models_that_hold_it(grounds: Grounds, text: str) -> None:
    assert waiting_text(grounds) == f"it needs 5.0 GiB of ram, of which 2.0 GiB is free; {text}"


def test_wait_without_a_model_that_may_be_unloaded_says_so() -> None:
    grounds = replace(LACKS_MEMORY, chosen=())
    assert waiting_text(grounds).endswith("and the models that hold it are pinned, busy or loading")
    assert waiting_change(grounds) == waiting_change(LACKS_MEMORY)[1:]
    assert waiting_change(LACKS_MEMORY)[0] == "Unload big."


def test_wait_behind_a_longer_wait_says_so() -> None:
    """All of it is free, but another model gets it."""
    grounds = replace(LACKS_MEMORY, free={RAM: 9 * GIB, COUNT: 1})
    assert waiting_text(grounds).startswith("it needs memory that a model gets which has waited longer;")


def test_memory_below_zero_is_shown_as_zero() -> None:
    grounds = replace(LACKS_MEMORY, free={RAM: -GIB, COUNT: 1})
    assert "of which 0 B is free" in waiting_text(grounds)


def test_removed_model_is_named_by_its_id_alone() -> None:
    grounds = replace(LACKS_MEMORY, chosen=(BIG, Candidate("old removed 1234", {RAM: GIB}, (0, 0, 1.0))))
    assert "big and old must be unloaded first" in waiting_text(grounds)


def test_recorded_wait_does_not_name_models_that_change() -> None:
    assert waiting(NOON, "qwen", LACKS_MEMORY).text == (
        "qwen waits because it needs 5.0 GiB of ram, of which 2.0 GiB is free."
    )


# --- smaller


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            Change("--ctx-size", "32768", "8192"),
            "8,192 tokens of context per request instead of 32,768",
        ),
        (Change("--parallel", "4", "1"), "1 slot instead of 4"),
        (Change("--parallel", "4", "2"), "2 slots instead of 4"),
        (Change("--kv-type", "f16", "q8_0"), "a KV cache of q8_0 instead of f16"),
        (Change("--gpu-layers", "auto", "12"), "12 layers on the GPU instead of as many as fit"),
        (Change("--gpu-layers", "24", "12"), "12 layers on the GPU instead of 24"),
        (Change("--flash-attn", "on", "off"), "--flash-attn off instead of on"),
    ],
)
def test_each_setting_that_is_smaller_is_named(change: Change, text: str) -> None:
    assert reductions_text([Reduction(change, "it crashed")]) == [f"{text}, because it crashed"]


def test_settings_with_the_same_reason_share_a_sentence() -> None:
    reductions = [
        TWO_SLOTS,
        replace(TWO_SLOTS, change=Change("--kv-type", "f16", "q8_0")),
        Reduction(Change("--ctx-size", "9999", "2048"), "the model was trained for it", fixed=True),
    ]
    assert reductions_text(reductions) == [
        "2 slots instead of 4 and a KV cache of q8_0 instead of f16, "
        "because the larger plan does not fit in memory",
        "2,048 tokens of context per request instead of 9,999, because the model was trained for it",
    ]
    assert len(reductions_change(reductions)) == 3
    assert reductions_change(reductions[2:]) == ("A longer context needs a model that was trained for it.",)
    assert reductions_change(()) == ()
