"""Checks what is true of every instance after every event, in the tests and in asyncio's debug mode."""

from __future__ import annotations

from collections.abc import Iterator

from llamasup.core.supervision.states import LIVE, Instance, State


def violations(instance: Instance) -> Iterator[str]:
    """The broken invariants, as sentences."""
    state, alive = instance.state, instance.alive
    if alive != (state in LIVE):
        yield f"a child {'exists' if alive else 'is missing'} in state {state}"
    if instance.next_start_s is not None and state not in {State.BACKOFF, State.FAILED}:
        yield f"a start is due in state {state}"
    if state is State.BACKOFF and instance.next_start_s is None:
        yield "no start is due in state backoff"
    if instance.restart_pending and state not in {State.DRAINING, State.STOPPING}:
        yield f"a restart is pending in state {state}"
    if instance.kill_reason is not None and state is not State.STOPPING:
        yield f"a kill reason is left in state {state}"
    if state is State.FAILED and instance.last is None:
        yield "no diagnosis in state failed"
    if instance.transferring_slots and not alive:
        yield "slots of no child are transferred"
