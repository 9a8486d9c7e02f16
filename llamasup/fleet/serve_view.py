"""Names and addresses for Ray Serve, and what its status says, in llamasup's words (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from llamasup.fleet.messages import NodeReport
from llamasup.http.address import is_loopback
from llamasup.settings.sections import Fleet

__all__ = ["DIRECTORY", "deployment_name", "first_line", "serve_address", "status_of", "why_not_ready"]

DIRECTORY: Final = "directory"
_PREFIX: Final = "model-"
_PORT: Final = 8000  # Serve's own default
_APPLICATION: Final = {
    "NOT_STARTED": "deploying",
    "DEPLOY_FAILED": "failed",
    "DELETING": "ending",
}
_DEPLOYMENT: Final = {"HEALTHY": "ready", "DEPLOY_FAILED": "failed"}


def deployment_name(model: str) -> str:
    """Serve reserves #, and shows names in URLs of its dashboard."""
    return _PREFIX + quote(model, safe="")


def serve_address(fleet: Fleet) -> tuple[str, int]:
    """Where Serve listens on the head. Without a config key, on all addresses: fronts must reach it."""
    if fleet.listen is not None:
        host, _, port = fleet.listen.rpartition(":")
        return host.strip("[]"), int(port)
    url = urlsplit(fleet.directory or "")
    if url.scheme != "http":  # https: a proxy before Serve
        return "0.0.0.0", _PORT  # noqa: S104 - the directory checks a key, and serves nothing else
    host = url.hostname or ""
    return (host if is_loopback(host) else "0.0.0.0", url.port or 80)  # noqa: S104


def first_line(error: BaseException) -> str:
    """The first line of its message; the name of the error without one."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def status_of(
    application: Any, nodes: Iterable[tuple[NodeReport, bool]] | None, *, no_nodes: str = ""
) -> Mapping[str, Any]:
    """The object of ``llamasup fleet status --json``. ``application``: Serve's, or None. ``nodes``: each with
    whether it leaves; None with ``no_nodes``: why they are not known.
    """
    if application is None:
        return {"application": None, "message": None, "models": [], "nodes": []}
    state = application.status.value
    return {
        "application": _APPLICATION.get(state, state.lower()),
        "message": application.message or no_nodes or None,
        "models": [
            {
                "id": unquote(name.removeprefix(_PREFIX)),
                "state": _DEPLOYMENT.get(deployment.status.value, deployment.status.value.lower()),
                "replicas": {state.lower(): count for state, count in deployment.replica_states.items()},
                "message": deployment.message or None,
            }
            for name, deployment in application.deployments.items()
            if name != DIRECTORY
        ],
        "nodes": None
        if nodes is None
        else [
            {
                "name": report.name,
                "url": report.url,
                "model": report.model,
                "state": "leaving" if leaving else "ready",
                "slots": report.load.slots,
                "slots_busy": report.load.busy,
                "queued": report.load.queued,
            }
            for report, leaving in nodes
        ],
    }


def why_not_ready(shown: Mapping[str, Any]) -> str:
    """The reason of an application that does not run: that of a model, if there is one."""
    reasons = [
        f"{model['id']}: {model['message']}"
        for model in shown["models"]
        if model["state"] != "ready" and model["message"]
    ]
    return next(iter(reasons), shown["message"] or f"the application is {shown['application']}")
