"""Which of its models a virtual model takes, and the sentences about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.routes import Work
from llamasup.core.queueing.wait_estimate import ServedLoad
from llamasup.features.virtual.choice import RULE, Option, choose, explain_virtual

FREE = ServedLoad(4, 2)
BUSY = ServedLoad(4, 0, waiting=3)
LOADING = ServedLoad(loads=True, eta_s=9.0)
ABSENT = ServedLoad()
BROKEN = ServedLoad(can_serve=False)


@pytest.mark.parametrize(
    ("loads", "index"),
    [
        ([BROKEN], 0),
        ([ABSENT, FREE, FREE], 1),
        ([BUSY, FREE], 1),
        ([ABSENT, BUSY], 1),
        ([BUSY, ServedLoad(4, 0, waiting=2)], 1),
        ([BUSY, ServedLoad(1, 0, waiting=1)], 0),  # one slot: its queue takes longer
        ([BUSY, ServedLoad(4, 0, waiting=3)], 0),
        ([LOADING, BUSY], 1),
        ([ABSENT, LOADING], 1),
        ([LOADING, ServedLoad(loads=True, eta_s=2.0)], 1),
        ([ServedLoad(loads=True), LOADING], 1),  # an unknown time is the longest
        ([BROKEN, ABSENT, ABSENT], 1),
        ([BROKEN, BROKEN], 0),
        ([ServedLoad(4, 0, waiting=1, can_serve=False), BUSY], 1),  # its queue is full
        ([ServedLoad(4, 0, waiting=1, can_serve=False), ABSENT], 1),
    ],
)
def test_request_takes_the_model_that_serves_first(loads: list[ServedLoad], index: int) -> None:
    assert choose(loads).index == index


LOADS = st.builds(
    ServedLoad,
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
    st.none() | st.floats(0, 9),
    st.booleans(),
)


@given(st.lists(LOADS, min_size=1, max_size=5))
def test_model_that_cannot_serve_is_taken_only_if_none_can(loads: list[ServedLoad]) -> None:
    chosen = choose(loads)
    assert loads[chosen.index].can_serve or not any(load.can_serve for load in loads)
    assert chosen.reason


def test_rule_and_each_model_are_explained() -> None:
    loads = {"a": BUSY, "b": FREE, "c": LOADING, "d": ABSENT, "e": BROKEN}
    found = explain_virtual("fast", [Option(model, load) for model, load in loads.items()], ["gone"])
    assert found.sentences == (
        f"fast is a virtual model, for one of a, b, c, d, e, gone. {RULE}",
        "a is loaded: 0 of 4 slots are free, and 3 waiting.",
        "b is loaded: 2 of 4 slots are free.",
        "c is being loaded, about 9 s left.",
        "d is not loaded.",
        "e is not loaded, and takes no requests now.",
        "There is no model gone.",
        "A request now takes b, because it is the first that is loaded and has a free slot.",
    )
    assert found.change == ("Add the model gone, or remove it from the virtual model fast in the config.",)


def test_one_model_needs_no_rule() -> None:
    found = explain_virtual("v", [Option("m", ServedLoad(loads=True))], [])
    assert found.sentences == ("v is a virtual model: its requests go to m.",)
    assert explain_virtual("v", [], ["m"]).sentences == ("There is no model m.",)


def test_models_for_different_work_are_explained_by_the_work() -> None:
    chat, other = Option("chat", BUSY, (Work.TEXT,)), Option("other", FREE, (Work.TEXT,))
    options = [Option("embed", FREE, (Work.EMBEDDINGS,)), chat, other]
    assert explain_virtual("v", options, []).sentences[-2:] == (
        "A request for text now takes other, because it is the first that is loaded and has a free slot.",
        "A request for embeddings now takes embed, because it is the only one that can.",
    )
