"""A request in flight."""

from __future__ import annotations

from llamasup.core.proxy.live.state import LivePhase, LiveRequest

__all__ = ["REQUEST"]

REQUEST = LiveRequest(
    id="a",
    method="POST",
    path="/completion",
    model="tiny",
    key=None,
    client="127.0.0.1",
    phase=LivePhase.PROMPT,
    age_s=1.5,
)
