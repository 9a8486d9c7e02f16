from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamasup.cli.commands.fleet import shown_text
from llamasup.fleet.messages import NodeLoad, NodeReport
from llamasup.fleet.serve_view import deployment_name, first_line, serve_address, status_of, why_not_ready
from llamasup.settings.sections import Fleet


@pytest.mark.parametrize(
    ("directory", "listen", "address"),
    [
        (None, None, ("0.0.0.0", 8000)),
        ("http://head:8000", None, ("0.0.0.0", 8000)),
        ("http://192.0.2.1:9000/fleet", None, ("0.0.0.0", 9000)),
        ("http://head", None, ("0.0.0.0", 80)),
        ("http://127.0.0.1:8001", None, ("127.0.0.1", 8001)),
        ("http://localhost:8001", None, ("localhost", 8001)),
        ("https://fleet.example.net", None, ("0.0.0.0", 8000)),
        ("https://fleet.example.net", "127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("http://head:8000", "[::]:8000", ("::", 8000)),
    ],
)
def test_serve_listens_where_fronts_reach_it(
    directory: str | None, listen: str | None, address: tuple[str, int]
) -> None:
    assert serve_address(Fleet(directory=directory, listen=listen)) == address


def test_two_models_never_have_one_deployment() -> None:
    names = ["a/b", "a--b", "a%2Fb", "a#b", "a-b", "A/b"]
    assert len({deployment_name(name) for name in names}) == len(names)
    assert not any(set("#/") & set(deployment_name(name)) for name in names)


def test_first_line_of_an_error_is_never_missing() -> None:
    assert first_line(ValueError("\n  one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


def deployment(status: str, message: str = "", **replicas: int) -> Any:
    return SimpleNamespace(status=SimpleNamespace(value=status), message=message, replica_states=replicas)


def application(status: str, message: str = "", **deployments: Any) -> Any:
    named = {deployment_name(name): value for name, value in deployments.items()}
    return SimpleNamespace(
        status=SimpleNamespace(value=status),
        message=message,
        deployments={"directory": deployment("HEALTHY", RUNNING=1), **named},
    )


def test_status_shows_models_and_nodes_in_our_words() -> None:
    running = application("RUNNING", **{"org/tiny": deployment("HEALTHY", RUNNING=1, STOPPING=1)})
    load = NodeLoad(slots=4, busy=3, queued=1)
    nodes = [(NodeReport("tiny@a", "https://192.0.2.1:1", "org/tiny", load), False)]
    nodes += [(NodeReport("tiny@b", "https://192.0.2.2:1", "org/tiny"), True)]
    shown = status_of(running, nodes)
    assert shown == {
        "application": "running",
        "message": None,
        "models": [
            {"id": "org/tiny", "state": "ready", "replicas": {"running": 1, "stopping": 1}, "message": None}
        ],
        "nodes": [
            {
                "name": "tiny@a",
                "url": "https://192.0.2.1:1",
                "model": "org/tiny",
                "state": "ready",
                "slots": 4,
                "slots_busy": 3,
                "queued": 1,
            },
            {
                "name": "tiny@b",
                "url": "https://192.0.2.2:1",
                "model": "org/tiny",
                "state": "leaving",
                "slots": 0,
                "slots_busy": 0,
                "queued": 0,
            },
        ],
    }
    text = shown_text(shown)
    assert text.startswith("Fleet: running\n")
    assert "1 running, 1 stopping" in text
    assert "3 of 4 slots busy" in text
    assert "leaving" in text


def test_status_without_nodes_says_why() -> None:
    shown = status_of(
        application("DEPLOYING", tiny=deployment("UPSCALING")), None, no_nodes="The directory is starting."
    )
    assert shown["nodes"] is None
    assert shown["application"] == "deploying"
    assert shown["models"][0]["state"] == "upscaling"
    assert "Fleet: deploying: The directory is starting." in shown_text(shown)
    assert "no replica" in shown_text(shown)


def test_status_of_nothing() -> None:
    shown = status_of(None, None)
    assert shown == {"application": None, "message": None, "models": [], "nodes": []}
    assert "Nothing is deployed" in shown_text(shown)


def test_reason_of_a_failed_deployment_is_that_of_its_model() -> None:
    failed = application(
        "DEPLOY_FAILED", "1 deployment failed", tiny=deployment("DEPLOY_FAILED", "no memory")
    )
    assert status_of(failed, None)["application"] == "failed"
    assert why_not_ready(status_of(failed, None)) == "tiny: no memory"
    assert why_not_ready(status_of(application("DELETING", "It ends"), None)) == "It ends"
    assert why_not_ready(status_of(application("NOT_STARTED"), None)) == "the application is deploying"
