"""Keeps an endpoint free for the next suspect, so that it runs alone (``suspects.py`` says why)."""

from __future__ import annotations

from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.queueing.suspects import place_for


class Reservation:
    """Reserves at most one ``endpoint``, which gives out no more permits until all have been returned."""

    __slots__ = ("endpoint",)

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None

    def __repr__(self) -> str:
        return f"<Reservation of {self.endpoint!r}>"

    def place(self, eligible: tuple[Endpoint, ...]) -> Endpoint | None:
        """Find the idle endpoint for the next suspect. None: one is reserved, or another suspect runs."""
        index = place_for([None if each.trial is not None else each.taken for each in eligible])
        endpoint = None if index is None else eligible[index]
        if endpoint is None or endpoint.taken:
            self._move_to(endpoint)
            return None
        self._move_to(None)
        return endpoint

    def end(self) -> None:
        """End the reservation: no suspect waits any more."""
        self._move_to(None)

    def _move_to(self, endpoint: Endpoint | None) -> None:
        if self.endpoint is not endpoint:
            if self.endpoint is not None:
                self.endpoint.reserve(reserved=False)
            if endpoint is not None:
                endpoint.reserve(reserved=True)
            self.endpoint = endpoint
