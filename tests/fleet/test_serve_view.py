from __future__ import annotations

import pytest

from llamasup.cli.commands.fleet import shown_text
from llamasup.fleet.messages import NodeLoad, NodeReport
from llamasup.fleet.serve_view import (
    Deployed,
    Problem,
    deployment_name,
    is_reached_at,
    next_version,
    problems,
    reason,
    route_prefix,
    serve_address,
    starting,
    status_of,
    why_not_ready,
)
from llamasup.fleet.settings import Fleet
from tests.extended.fleet.played_serve import application, deployment


@pytest.mark.parametrize(
    ("directory", "listen", "address"),
    [
        (None, None, ("127.0.0.1", 8000)),
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


@pytest.mark.parametrize(
    ("wanted", "actual", "reached"),
    [
        (("0.0.0.0", 8000), ("0.0.0.0", 8000), True),
        (("0.0.0.0", 8000), ("192.0.2.1", 8000), True),
        (("0.0.0.0", 8000), ("127.0.0.1", 8000), False),
        (("127.0.0.1", 8000), ("127.0.0.1", 8000), True),
        (("127.0.0.1", 8000), ("0.0.0.0", 8000), True),
        (("0.0.0.0", 8000), ("0.0.0.0", 8001), False),
    ],
)
def test_serve_that_runs_already_must_be_where_fronts_expect_it(
    wanted: tuple[str, int], actual: tuple[str, int], reached: bool
) -> None:
    assert is_reached_at(wanted, actual) == reached


def test_path_of_the_directory_is_the_route_of_serve() -> None:
    for directory, route in (
        (None, "/"),
        ("http://head:8000", "/"),
        ("http://head:8000/", "/"),
        ("https://fleet.example.net/team/a/", "/team/a"),
    ):
        assert route_prefix(Fleet(directory=directory)) == route


def test_deployment_that_has_failed_gets_a_new_version_and_keeps_it() -> None:
    assert next_version("aa", None, "1") == "aa"
    assert next_version("aa", Deployed("aa", failed=False), "1") == "aa"
    assert next_version("aa", Deployed("aa", failed=True), "1") == "aa-1"
    assert next_version("aa", Deployed("aa-1", failed=False), "2") == "aa-1"
    assert next_version("aa", Deployed("aa-1", failed=True), "2") == "aa-2"
    for failed in (True, False):
        assert next_version("bb", Deployed("aa-1", failed), "2") == "bb"


# Of Ray 2.60, shortened.
FAILED = """\
The deployment failed to start 3 times in a row. This may be due to a problem with its constructor or \
initial health check failing. See controller logs for details. Error:
\x1b[36mray::ServeReplica:llamasup:model-tiny.initialize_and_get_metadata()\x1b[39m (pid=28140, ip=192.0.2.2)
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 401, in __get_result
    raise self._exception
           ^^^^^^^^^^^^^^^^^^^
RuntimeError: Traceback (most recent call last):
  File "/opt/llamasup/fleet/application.py", line 152, in __init__
    await self._process.start()
{}
"""
TASK = """\
RayTaskError(RayServeException): \x1b[36mray::ServeController.deploy_applications()\x1b[39m (pid=27789)
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 401, in __get_result
    raise self._exception
ray.serve.exceptions.RayServeException: Prefix / is being used by application(s) chat.
"""
UNSCHEDULED = """\
Deployment 'model-tiny' in application 'llamasup' has 1 replicas that have taken more than 30s to be \
scheduled. This may be due to waiting for the cluster to auto-scale or for a runtime environment to be \
installed. Resources required for each replica: {"CPU": 64.0}, total resources available: {"CPU": 1.0}. \
Use `ray status` for more details."""
RETRIES = """\
A replica failed to start with exception. Retrying 2 more time(s). Error:
\x1b[36mray::ServeReplica:llamasup:model-tiny.initialize_and_get_metadata()\x1b[39m (pid=28140)
  File "/opt/llamasup/fleet/application.py", line 152, in __init__
llamasup.errors.ServerFailed: no memory
"""
UNSTARTED = """\
Deployment 'model-tiny' in application 'llamasup' has 1 replicas that have taken more than 30s to initialize.
This may be caused by a slow __init__ or reconfigure method."""
DIED = """\
The deployment failed to start 3 times in a row. This may be due to a problem with its constructor or \
initial health check failing. See controller logs for details. Error:
The actor died unexpectedly before finishing this task.
\tclass_name: ServeReplica:llamasup:model-tiny
\tactor_id: 813caddb73c02bcb5d7fca8902000000
"""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", ""),
        ("\n  one\ntwo", "one"),
        (FAILED.format("llamasup.errors.ServerFailed: Node a: no file"), "Node a: no file"),
        (FAILED.format("llamasup.errors.ServerFailed"), "ServerFailed"),
        (FAILED.format("OSError: [Errno 28] No space left"), "OSError: [Errno 28] No space left"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("Traceback (most recent call last):\n  File ...", "Traceback (most recent call last):"),
        (TASK, "RayServeException: Prefix / is being used by application(s) chat."),
        (
            UNSCHEDULED,
            'no machine has been free for 30 s: a replica needs {"CPU": 64.0}, and {"CPU": 1.0} are free',
        ),
        (UNSTARTED, "a replica has been loading or downloading the model for more than 30 s"),
        (DIED, "The actor died unexpectedly before finishing this task."),
    ],
)
def test_message_of_ray_becomes_one_line_without_a_traceback(message: str, said: str) -> None:
    assert reason(message) == said


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
                "asleep": False,
                "slots": 4,
                "slots_busy": 3,
                "queued": 1,
            },
            {
                "name": "tiny@b",
                "url": "https://192.0.2.2:1",
                "model": "org/tiny",
                "state": "leaving",
                "asleep": False,
                "slots": 0,
                "slots_busy": 0,
                "queued": 0,
            },
        ],
    }
    text = shown_text({**shown, **NAME})
    assert text.startswith("Fleet llamasup on the Ray cluster at head:6379: running\n")
    assert "1 running, 1 stopping" in text
    assert "3 of 4 slots busy" in text
    assert "leaving" in text


NAME = {"fleet": "llamasup", "cluster": "head:6379"}


def test_status_says_that_a_node_sleeps() -> None:
    node = NodeReport("tiny@a", "https://192.0.2.1:1", "tiny", NodeLoad(slots=4, asleep=True))
    shown = status_of(application(tiny=deployment(RUNNING=1)), [(node, False)])
    assert (shown["nodes"][0]["state"], shown["nodes"][0]["asleep"]) == ("ready", True)
    text = shown_text({**shown, **NAME})
    assert "asleep" in text
    assert "ready" not in text.partition("Nodes:")[2]


def test_replicas_that_start_are_counted_by_model() -> None:
    found = application(**{"org/a": deployment(STARTING=2, RUNNING=1), "b": deployment(RUNNING=1)})
    assert starting(found) == {"org/a": 2}


def test_status_without_nodes_says_why() -> None:
    shown = status_of(
        application("DEPLOYING", tiny=deployment("UPSCALING")), None, no_nodes="The directory is starting."
    )
    assert shown["nodes"] is None
    assert shown["application"] == "deploying"
    assert shown["models"][0]["state"] == "upscaling"
    text = shown_text({**shown, **NAME})
    assert "at head:6379: deploying: The directory is starting." in text
    assert "no replica" in text


def test_status_of_nothing() -> None:
    shown = status_of(None, None)
    assert shown == {"application": None, "message": None, "models": [], "nodes": []}
    assert "Nothing is deployed as llamasup on the Ray cluster at head:6379" in shown_text({**shown, **NAME})


@pytest.mark.parametrize(
    ("status", "trigger"),
    [("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED"), ("UNHEALTHY", "REPLICA_STARTUP_FAILED")],
)
def test_reason_of_a_failed_deployment_is_that_of_its_model(status: str, trigger: str) -> None:
    tiny = deployment(status, FAILED.format("llamasup.errors.ServerFailed: no memory"), trigger)
    failed = application("DEPLOY_FAILED", "Failed to update the deployments ['model-tiny'].", tiny=tiny)
    shown = status_of(failed, None)
    assert shown["application"] == "failed"
    assert shown["message"] is None, "that of Serve only names the model"
    assert (shown["models"][0]["state"], shown["models"][0]["message"]) == ("failed", "no memory")
    assert why_not_ready(shown) == "tiny: no memory"
    assert problems(failed) == {"tiny": Problem("its last start failed: no memory", failed=True)}


def test_reason_without_a_failed_model_is_that_of_the_application() -> None:
    assert why_not_ready(status_of(application("DELETING", "It ends"), None)) == "It ends"
    assert why_not_ready(status_of(application("NOT_STARTED"), None)) == "the application is deploying"
    unhealthy = application("UNHEALTHY", tiny=deployment("UNHEALTHY", trigger="HEALTH_CHECK_FAILED"))
    assert status_of(unhealthy, None)["models"][0]["state"] == "unhealthy"
    assert problems(unhealthy) == {}
    waiting = application("DEPLOYING", tiny=deployment("UPSCALING", UNSCHEDULED))
    (problem,) = problems(waiting).values()
    again = application("DEPLOYING", tiny=deployment("UPDATING", RETRIES))
    assert problems(again) == {"tiny": Problem("its last start failed: no memory", failed=False)}
    grows = application("DEPLOYING", tiny=deployment("UPSCALING", "Upscaling from 0 to 1 replicas."))
    assert problems(grows) == {}
    assert status_of(grows, None)["models"][0]["message"] is None
    assert (problem.reason.partition(":")[0], problem.failed) == ("no machine has been free for 30 s", False)
