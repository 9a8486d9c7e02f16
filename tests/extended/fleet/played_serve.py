"""Objects as those of ``serve.status()`` (Ray 2.60)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llamasup.fleet.serve_view import deployment_name

__all__ = ["application", "deployment"]


def deployment(status: str = "HEALTHY", message: str = "", trigger: str = "", **replicas: int) -> Any:
    return SimpleNamespace(
        status=SimpleNamespace(value=status),
        status_trigger=SimpleNamespace(value=trigger),
        message=message,
        replica_states=replicas,
    )


def application(status: str = "RUNNING", message: str = "", **models: Any) -> Any:
    """A fleet with a directory, and an ingress that starts. ``models``: their deployments."""
    named = {deployment_name(name): value for name, value in models.items()}
    return SimpleNamespace(
        status=SimpleNamespace(value=status),
        message=message,
        deployments={
            "ingress": deployment("UPDATING", message="A replica failed to start with exception."),
            "directory": deployment(RUNNING=1),
            **named,
        },
    )
