"""The state of a model, from the states of its phase and its processes."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.shown_state import state_of
from llamasup.core.supervision.states import State


@pytest.mark.parametrize(
    ("phase", "processes", "more", "word"),
    [
        (Phase.ABSENT, [], {}, "stopped"),
        (Phase.ABSENT, [State.STOPPED], {}, "stopped"),
        (Phase.ABSENT, [], {"broken": True}, "broken"),
        (Phase.ABSENT, [], {"waits_for": "memory"}, "waiting"),
        (Phase.ABSENT, [], {"waits_for": "download"}, "downloading"),
        (Phase.LOADING, [State.STOPPED], {}, "starting"),
        (Phase.LOADING, [State.LOADING], {}, "loading"),
        (Phase.LOADING, [State.BACKOFF], {}, "backoff"),
        (Phase.RESIDENT, [State.BACKOFF, State.READY], {}, "ready"),
        (Phase.RESIDENT, [State.READY], {"waits_for": "memory"}, "ready"),
        (Phase.CORDONED, [State.READY], {}, "draining"),
        (Phase.UNLOADING, [State.DRAINING], {}, "draining"),
        (Phase.UNLOADING, [State.STOPPED], {}, "stopping"),
        (Phase.FAILED, [State.FAILED], {}, "failed"),
        (Phase.FAILED, [], {"broken": True}, "broken"),
    ],
)
def test_state_of_a_model_follows_from_phase_and_processes(
    phase: Phase, processes: list[State], more: dict[str, Any], word: str
) -> None:
    assert state_of(phase, processes, **more) == word
