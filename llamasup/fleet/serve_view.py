"""Names things for Ray Serve, and translates its status into llamasup's words (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

from llamasup.core.http.address import is_loopback
from llamasup.fleet.messages import NodeReport
from llamasup.fleet.settings import Fleet

DIRECTORY: Final = "directory"
INGRESS: Final = "ingress"
FLEET_ID: Final = "fleet_id"
"""The key of the directory's ``user_config`` with the id of its fleet."""
LAST_FAILED: Final = "its last start failed: "
_PREFIX: Final = "model-"
_PORT: Final = 8000  # Serve's own default
_APPLICATION: Final = {
    "NOT_STARTED": "deploying",
    "DEPLOYING": "deploying",
    "DEPLOY_FAILED": "failed",
    "RUNNING": "running",
    "UNHEALTHY": "unhealthy",
    "DELETING": "ending",
}
_DEPLOYMENT: Final = {
    "UPDATING": "updating",
    "HEALTHY": "ready",
    "UNHEALTHY": "unhealthy",
    "DEPLOY_FAILED": "failed",
    "UPSCALING": "upscaling",
    "DOWNSCALING": "downscaling",
}
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: (.*))?")
"""The last line of a traceback: the error without its module, and what it says."""
_UNSCHEDULED: Final = re.compile(
    r"more than (\d+)s to be scheduled\..* for each replica: (.*), total resources available: (.*?)\. Use",
    re.S,
)
_FAILED_START: Final = "A replica failed to start with exception."
_SCALES: Final = re.compile(r"(Up|Down)scaling from \d+ to \d+ replicas\.")  # its state says so
_UNSTARTED: Final = re.compile(r"more than (\d+)s to initialize\.")


def deployment_name(model: str) -> str:
    """Serve reserves #, and shows names in URLs of its dashboard."""
    return _PREFIX + quote(model, safe="")


def serve_address(fleet: Fleet) -> tuple[str, int]:
    """Return the address on which Serve listens on the head. With ``directory``, these are all addresses,
    so that fronts on other machines reach it, unless ``directory`` is a loopback address.
    """
    if fleet.listen is not None:
        host, _, port = fleet.listen.rpartition(":")
        return host.strip("[]"), int(port)
    if fleet.directory is None:
        return "127.0.0.1", _PORT
    url = urlsplit(fleet.directory)
    if url.scheme != "http":  # https: a proxy before Serve
        return "0.0.0.0", _PORT  # noqa: S104 - the directory checks a key, and so does the ingress
    host = url.hostname or ""
    return (host if is_loopback(host) else "0.0.0.0", url.port or 80)  # noqa: S104


def is_reached_at(wanted: tuple[str, int], actual: tuple[str, int]) -> bool:
    """Tell whether fronts that expect a Serve at ``wanted`` reach one that runs at ``actual``."""
    return wanted[1] == actual[1] and (is_loopback(wanted[0]) or not is_loopback(actual[0]))


def route_prefix(fleet: Fleet) -> str:
    """Return the path of ``directory``: one Serve can have several fleets."""
    return "/" + urlsplit(fleet.directory or "").path.strip("/")


class Deployed(Struct, frozen=True):
    """A deployment that Serve has. ``failed``: its replicas failed to start."""

    version: str
    failed: bool


def next_version(content: str, deployed: Deployed | None, nonce: str) -> str:
    """Return the version of a deployment. ``content``: a hash of what it runs.

    Serve (2.60) ignores a deployment with the same version, and starts no replica of one that has failed,
    also if what was wrong is corrected. The version that this needs has to stay at later deployments, which
    would replace the replicas otherwise.
    """
    if deployed is None or deployed.version.partition("-")[0] != content:
        return content
    return f"{content}-{nonce}" if deployed.failed else deployed.version


def reason(message: str) -> str:
    """Extract from a message of Serve or Ray what went wrong, in one line. Messages may have colours, an
    introduction of Serve that ends with ``Error:``, and a traceback.
    """
    text = _SCALES.sub("", _COLOURS.sub("", message))
    if (waits := _UNSCHEDULED.search(text)) is not None:
        after_s, needed, free = waits.groups()
        return f"no machine has been free for {after_s} s: a replica needs {needed}, and {free} are free"
    if (starts := _UNSTARTED.search(text)) is not None:
        return f"a replica has been loading or downloading the model for more than {starts[1]} s"
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if "Traceback (most recent call last):" in text or "ray::" in text:
        for line in reversed(lines):
            if (raised := _RAISED.fullmatch(line)) is not None:
                name, said = raised.groups()
                return said if name == "ServerFailed" and said else f"{name}: {said}" if said else name
    if "Error:" in (introduced := [line.rpartition(" ")[2] for line in lines[:-1]]):
        return lines[introduced.index("Error:") + 1]
    return lines[0].strip() if lines else ""


class Problem(Struct, frozen=True):
    """The reason for no replica of a model, a part of a sentence. ``failed``: Serve starts none any more."""

    reason: str
    failed: bool


def problems(application: Any) -> Mapping[str, Problem]:
    """Return the problems by model; a model without a problem is left out."""
    found = {}
    for name, deployment in application.deployments.items():
        if not name.startswith(_PREFIX):
            continue
        failed, message = has_failed(deployment), deployment.message
        if failed or _FAILED_START in message:
            found[_model_of(name)] = Problem(LAST_FAILED + reason(message), failed)
        elif _UNSCHEDULED.search(message) or _UNSTARTED.search(message):
            found[_model_of(name)] = Problem(reason(message), failed)
    return found


def starting(application: Any) -> Mapping[str, int]:
    """Count the replicas of each model that start, or wait until Ray has placed them."""
    return {
        _model_of(name): deployment.replica_states["STARTING"]
        for name, deployment in application.deployments.items()
        if name != DIRECTORY and "STARTING" in deployment.replica_states
    }


def has_failed(deployment: Any) -> bool:
    """Tell whether Serve has given up, or would without running replicas. Its status alone does not say it:
    it depends on what the deployment did before.
    """
    statuses = (deployment.status.value, deployment.status_trigger.value)
    return "DEPLOY_FAILED" in statuses or "REPLICA_STARTUP_FAILED" in statuses


def _model_of(deployment: str) -> str:
    return unquote(deployment.removeprefix(_PREFIX))


def status_of(
    application: Any, nodes: Iterable[tuple[NodeReport, bool]] | None, *, no_nodes: str = ""
) -> Mapping[str, Any]:
    """Return the object of ``llamasup fleet status --json``. ``application``: Serve's, or None. ``nodes``:
    each with whether it leaves. If the nodes are not known, ``nodes`` is None and ``no_nodes`` says why.
    """
    if application is None:
        return {"application": None, "message": None, "models": [], "nodes": []}
    models = [
        {
            "id": _model_of(name),
            "state": "failed" if has_failed(deployment) else _DEPLOYMENT[deployment.status.value],
            "replicas": {state.lower(): count for state, count in deployment.replica_states.items()},
            "message": reason(deployment.message) or None,
        }
        for name, deployment in application.deployments.items()
        if name.startswith(_PREFIX)
    ]
    # Serve's own message only counts the models that it is about.
    said = "" if any(model["message"] for model in models) else reason(application.message)
    return {
        "application": _APPLICATION[application.status.value],
        "message": said or no_nodes or None,
        "models": models,
        "nodes": None
        if nodes is None
        else [
            {
                "name": report.name,
                "url": report.url,
                "model": report.model,
                "state": "leaving" if leaving else "ready",
                "asleep": report.load.asleep,
                "slots": report.load.slots,
                "slots_busy": report.load.busy,
                "queued": report.load.queued,
            }
            for report, leaving in nodes
        ],
    }


def why_not_ready(shown: Mapping[str, Any]) -> str:
    """Say why an application does not run: for the reason of a model, if there is one."""
    reasons = [
        f"{model['id']}: {model['message']}"
        for model in shown["models"]
        if model["state"] != "ready" and model["message"]
    ]
    return next(iter(reasons), shown["message"] or f"the application is {shown['application']}")
