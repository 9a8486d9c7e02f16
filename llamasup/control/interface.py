"""What the control application can ask of a running llamasup, whatever it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llamasup.models.diff import Changes

if TYPE_CHECKING:
    from llamasup.observability.metrics import InstanceGauges
    from llamasup.supervision.events import Bus

__all__ = ["ControlTarget", "shown"]


def shown(changes: Changes) -> Mapping[str, Any]:
    """What a reload has changed, in the one shape that it has whatever is served (docs/control.md)."""
    return {name: list(ids) for name, ids in asdict(changes).items()}


class ControlTarget(Protocol):
    """All methods are for the event loop's thread. ``model`` may be any name of it; an unknown one raises
    ModelUnknown, with near names in its remedy.
    """

    @property
    def bus(self) -> Bus: ...

    def status(self) -> Mapping[str, Any]:
        """The ``status`` object of the contract (docs/design.md)."""
        ...

    def gauges(self) -> Sequence[InstanceGauges]: ...

    async def scrape(self) -> Mapping[str, str]:
        """Every serving child's own Prometheus text, by model."""
        ...

    async def load(self, model: str) -> None:
        """Until it serves. Raises ModelUnknown, DoesNotFit, ServerFailed, …: what stopped it."""
        ...

    async def unload(self, model: str) -> None:
        """Until its memory is free. What is in flight has the drain's time."""
        ...

    async def restart(self, model: str) -> None:
        """Until it serves again. Requests wait meanwhile."""
        ...

    async def reload(self) -> Mapping[str, Any]:
        """Read the configuration again. Returns what has changed: ids of models (docs/control.md).

        Raises ConfigInvalid where it is not taken; then all is as before.
        """
        ...

    def shutdown(self, *, now: bool = False) -> None:
        """As SIGTERM; ``now``: as a second one. Asked again without it, nothing more happens."""
        ...

    def log_path(self, model: str) -> Path | None:
        """Where the output of its llama-server is kept; None: nowhere."""
        ...
