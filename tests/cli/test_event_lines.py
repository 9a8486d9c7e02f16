"""The lines about requests, models and the config on standard error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from llamasup.cli.output.event_lines import ConsoleReporter
from llamasup.core.http.address import TcpAddress
from llamasup.core.models.spec import Changes, ModelSpec
from llamasup.core.supervision.events import (
    ConfigRejected,
    Downloading,
    LoadFailed,
    LoadProgressed,
    ModelsChanged,
    ModelUnloading,
    Ready,
    StateChanged,
)
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.states import State
from llamasup.errors import ConfigInvalid, GaveUp, ModelInvalid, ServerFailed
from tests.cli.recording_view import RecordingView, reporter_to
from tests.core.observability.test_counters import DONE


def line_of(**changes: Any) -> tuple[str, str, str, dict[str, Any]]:
    view = RecordingView()
    reporter = reporter_to(view, has_many=changes.pop("of_many", False))
    left_out = changes.pop("left_out", None)
    record = msgspec.structs.replace(DONE, **changes)
    if left_out is None:
        reporter.request(record)
    else:
        reporter.slow_request(record, left_out)
    (only,) = view.lines
    return only


def test_request_is_one_line_with_all_fields_of_its_record() -> None:
    level, event, text, fields = line_of()
    assert (level, event) == ("info", "request")
    assert text == "POST  /completion  200  10+5 tokens  50.0 tok/s  300 ms"
    assert fields == msgspec.structs.asdict(DONE)


def test_request_line_names_model_of_many() -> None:
    text = line_of(of_many=True, model="qwen")[2]
    assert text == "POST  /completion  qwen  200  10+5 tokens  50.0 tok/s  300 ms"


@pytest.mark.parametrize(
    ("changes", "suffix"),
    [
        (
            {"status": 400, "context": "exceeded", "n_prompt_tokens": 5012, "n_ctx": 4096},
            "(context exceeded: 5,012 of 4,096 tokens)",
        ),
        ({"status": 400, "context": "exceeded"}, "(context exceeded)"),
        (
            {"context": "cut", "n_prompt_tokens": 12, "n_ctx": 4096},
            "(stopped at the end of the context, 4,096 tokens)",
        ),
        ({"context": "cut"}, "(stopped at the end of the context)"),
        ({"context": "shifted"}, "(context shifted: the oldest tokens were dropped)"),
        ({"outcome": "client_gone", "status": 499}, "(client gone)"),
        ({"replayed": True}, "(sent again)"),
        (
            {"outcome": "refused", "status": 429, "cause": "key_requests", "client": "key:alice"},
            "  alice  429  10+5 tokens  50.0 tok/s  300 ms (refused: key requests)",
        ),
        (
            {"outcome": "refused", "status": 401, "cause": "api_key", "client": "192.0.2.7"},
            "  192.0.2.7  401  10+5 tokens  50.0 tok/s  300 ms (refused: api key)",
        ),
        ({"outcome": "refused", "status": 404, "cause": "model_not_found"}, "(refused: model not found)"),
        ({"outcome": "unavailable", "status": 429, "cause": "queue_full"}, "(unavailable: queue full)"),
        ({"outcome": "revoked", "cause": "stopping"}, "(aborted: llamasup stopped)"),
        ({"outcome": "revoked", "cause": "segfault"}, "(aborted: segfault)"),
        ({"outcome": "revoked"}, "(aborted)"),
    ],
)
def test_request_line_ends_with_its_outcome(changes: dict[str, Any], suffix: str) -> None:
    level, _, text, _ = line_of(**changes)
    assert level == "info"
    assert text.endswith(suffix)


@pytest.mark.parametrize("outcome", ["local", "ok"])
def test_request_answered_by_llamasup_has_debug_level(outcome: str) -> None:
    assert line_of(model="", route="/metrics", outcome=outcome)[0] == "debug"


def test_request_of_a_batch_that_gave_way_has_debug_level() -> None:
    assert line_of(outcome="gave_way", status=503)[0] == "debug"


def test_failed_request_shows_its_request_id() -> None:
    level, _, text, _ = line_of(status=502, outcome="upstream_failed", request_id="abc-1")
    assert level == "warning"
    assert text.endswith("(upstream failed) [abc-1]")


def test_slow_request_shows_time_in_queue_and_in_llama_server() -> None:
    level, event, text, fields = line_of(
        queue_s=4.0, waited_s=3.9, first_byte_s=12.3, duration_s=45.2, left_out=0
    )
    assert (level, event) == ("warning", "slow_request")
    assert text == (
        "slow: POST /completion: 12.3 s to the first byte, 4.0 s in the queue (3.9 s waiting for the model) "
        "and 8.3 s in llama-server, 45.2 s in total, 10+5 tokens [r]"
    )
    assert fields["first_byte_s"] == 12.3


def test_slow_request_without_answer_shows_queue_time_and_number_left_out() -> None:
    _, _, text, fields = line_of(
        queue_s=30.0, first_byte_s=None, duration_s=30.0, tokens_completion=None, left_out=7
    )
    assert text == (
        "slow: POST /completion: no answer in 30.0 s, 30.0 s in the queue [r] "
        "(7 more since the last such line)"
    )
    assert fields["left_out"] == 7


# --- many models -------------------------------------------------------------------------------------------


def many(
    *specs: ModelSpec, default: str | None = None, loaded: str = "", nodes: bool = False
) -> tuple[RecordingView, ConsoleReporter]:
    ready = SimpleNamespace(instance=SimpleNamespace(state=State.READY), plan=None, load_s=1.5)
    hosted = SimpleNamespace(
        registry=SimpleNamespace(specs={spec.id: spec for spec in specs}, default=default),
        budget={"ram": 1 << 30},
        runners_of=lambda model: [ready] if model == loaded else [],
        has_other_nodes=nodes,
    )
    view = RecordingView()
    service = SimpleNamespace(launch=None, runner=None, hosted_models=hosted)
    return view, ConsoleReporter(view, cast("Any", service), 0.0)


def ready(*models: str) -> Ready:
    return Ready(TcpAddress("127.0.0.1", 8080), 7, models)


def test_ready_lists_broken_model_separately() -> None:
    view, reporter = many(ModelSpec("a", "/a.gguf"), ModelSpec("b", "/b.gguf", problem="truncated"))
    reporter.on_event(ready("a", "b"))
    heading, *facts = view.texts[0].splitlines()
    assert heading.startswith("llamasup is ready at http://127.0.0.1:8080 after ")
    assert facts == [
        "  models  1: a",
        "  loaded  none yet: a request loads the model that it names",
        "  broken  b (llamasup status --all shows why)",
        "  memory  1.0 GiB of RAM",
    ]


def test_ready_names_the_address_of_ollama() -> None:
    view, reporter = many(ModelSpec("a", "/a.gguf"))
    reporter.on_event(Ready(TcpAddress("127.0.0.1", 8080), 7, ("a",), TcpAddress("127.0.0.1", 11434)))
    assert view.texts[0].splitlines()[1] == "Ollama's API is at http://127.0.0.1:11434"


def test_ready_removes_live_line_and_lists_loaded_and_default_model() -> None:
    view, reporter = many(ModelSpec("a", "/a.gguf"), default="a", loaded="a")
    reporter.on_event(ready("a"))
    assert view.activity() is None
    assert "  loaded   a\n" in view.lines[0][2]
    assert "  default  a, for requests that name no model\n" in view.lines[0][2]


def test_ready_with_only_the_models_of_other_nodes_says_so() -> None:
    view, reporter = many(nodes=True)
    reporter.on_event(ready())
    assert "  models  those of other nodes" in view.lines[0][2]


def test_ready_without_models_says_so() -> None:
    view, reporter = many()
    reporter.on_event(ready())
    assert "  models  none yet" in view.lines[0][2]


def test_live_line_shows_other_model_that_still_loads() -> None:
    view, reporter = many(loaded="a")
    reporter.on_event(StateChanged("a", State.LOADING, 1))
    reporter.on_event(StateChanged("b", State.LOADING, 1))
    assert view.activity() == "loading b"
    reporter.on_event(StateChanged("b", State.READY, 1))
    assert view.activity() == "loading a"
    reporter.on_event(StateChanged("a", State.READY, 1))
    assert view.activity() is None
    texts = [text for level, _, text, _ in view.lines if level == "info"]
    assert texts == ["b is ready", "a is ready (loaded in 1.5 s)"]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (LoadProgress(43.2, 12.3, 9.0), "loading a: 43 %, 12 s left"),
        (
            LoadProgress(43.2, 74.0, 9.0, "the disk stalls"),
            "loading a: 43 %, 1 min 14 s left (the disk stalls)",
        ),
    ],
)
def test_live_line_shows_how_far_a_load_is(progress: LoadProgress, text: str) -> None:
    view, reporter = many()
    reporter.on_event(StateChanged("a", State.LOADING, 1))
    lines = len(view.lines)
    reporter.on_event(LoadProgressed("a", 1, progress))
    assert view.activity() == text
    assert len(view.lines) == lines  # a log has no line for it
    reporter.on_event(StateChanged("a", State.READY, 1))
    reporter.on_event(LoadProgressed("a", 1, progress))  # late
    assert view.activity() is None


def test_download_is_one_line_and_a_moving_live_line() -> None:
    view, reporter = many()
    for done in (0, 1 << 29):
        reporter.on_event(Downloading("org/m", done, 1 << 30, 1 << 20))
    assert view.texts == ["downloading org/m (1.0 GiB)"]
    assert view.activity() == "downloading org/m: 512 MiB of 1.0 GiB (50%), 1.0 MiB/s"


def test_failed_load_shows_message_and_remedy() -> None:
    view, reporter = many()
    reporter.on_event(Downloading("m", 0, None, 0))
    reporter.on_event(LoadFailed("m", ModelInvalid("It is truncated.", remedy="Get it again.")))
    assert view.activity() is None
    assert view.lines[-1][0] == "warning"
    assert view.lines[-1][2] == "m: It is truncated.\n  → Get it again."
    told = len(view.lines)
    for model, error in (
        ("m", GaveUp("Gave up after 6 crashes of llama-server.")),  # the exit has had its line
        ("m", ServerFailed("It is truncated.", cause="model_corrupt", exit_code=65)),
        (None, ModelInvalid("It is truncated.")),  # the error that ends llamasup is shown by itself
    ):
        reporter.on_event(LoadFailed(model, error))
    assert len(view.lines) == told


def test_control_command_is_shown_with_its_model() -> None:
    view, reporter = many()
    reporter.command("load", "bge")
    reporter.command("reload", "")
    reporter.command("upgrade", "")
    assert view.texts == [
        "llamasup load: loading bge.",
        "llamasup reload: reading the config again.",
        "llamasup upgrade: reading the new build of llama.cpp.",
    ]


def test_details_of_rejected_config_are_not_shown_as_log_of_llama_server() -> None:
    view, reporter = many()
    reporter.on_event(ConfigRejected(ConfigInvalid("c.yaml has 1 error.", details=("c.yaml:4: max_loaded",))))
    assert (
        view.lines[0][2]
        == "c.yaml has 1 error. The previous configuration stays in use.\n    c.yaml:4: max_loaded"
    )


@pytest.mark.parametrize(
    ("reason", "for_model", "why"),
    [
        ("memory", "b", "b needs its memory"),
        ("memory", "", "a limit was lowered"),
        ("ttl", "", "its TTL has expired"),
    ],
)
def test_unloaded_model_shows_reason_and_other_model(reason: str, for_model: str, why: str) -> None:
    view = RecordingView()
    reporter = reporter_to(view, has_many=True)
    reporter.on_event(ModelUnloading("a", reason, for_model))
    assert view.lines == [("info", "unload", f"a is unloaded: {why}", {"model": "a", "reason": reason})]


def test_reload_shows_changed_settings_and_models_only_if_they_changed() -> None:
    view = RecordingView()
    reporter = reporter_to(view, has_many=True)
    reporter.on_event(ModelsChanged(Changes(unchanged=("a",), settings=("memory", "max_loaded")), ("a",)))
    reporter.on_event(ModelsChanged(Changes(unchanged=("a",)), ("a",)))
    assert view.texts == [
        "Config reloaded: memory, max_loaded changed.",
        "Models: no changes.",
    ]
