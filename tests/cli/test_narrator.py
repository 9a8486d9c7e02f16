"""How a finished request is told to a person."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from llamasup.cli.output.console import Narrator
from llamasup.cli.output.view import View
from llamasup.errors import ConfigInvalid, ModelInvalid
from llamasup.http.address import TcpAddress
from llamasup.models.diff import Changes
from llamasup.models.spec import ModelSpec
from llamasup.supervision.events import (
    ConfigRejected,
    Downloading,
    LoadFailed,
    ModelsChanged,
    ModelUnloading,
    Ready,
    StateChanged,
)
from llamasup.supervision.states import State
from tests.observability.test_metrics import DONE


class Heard:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str, dict[str, Any]]] = []

    def say(self, level: str, event: str, text: str, **fields: Any) -> None:
        self.told.append((level, event, text, fields))


def told(**changes: Any) -> tuple[str, str, str, dict[str, Any]]:
    heard = Heard()
    service = SimpleNamespace(launch=None if changes.pop("of_many", False) else object())
    narrator = Narrator(cast("View", heard), cast("Any", service), 0.0)
    left_out = changes.pop("left_out", None)
    record = msgspec.structs.replace(DONE, **changes)
    if left_out is None:
        narrator.request(record)
    else:
        narrator.slow_request(record, left_out)
    (only,) = heard.told
    return only


def test_a_request_is_one_line_and_all_its_facts_for_machines() -> None:
    level, event, text, fields = told()
    assert (level, event) == ("info", "request")
    assert text == "POST  /completion  200  10+5 tokens  50.0 tok/s  300 ms"
    assert fields == msgspec.structs.asdict(DONE)


def test_of_many_models_it_says_which() -> None:
    text = told(of_many=True, model="qwen")[2]
    assert text == "POST  /completion  qwen  200  10+5 tokens  50.0 tok/s  300 ms"


@pytest.mark.parametrize(
    ("changes", "said"),
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
    ],
)
def test_what_was_unusual_is_said_behind_it(changes: dict[str, Any], said: str) -> None:
    level, _, text, _ = told(**changes)
    assert level == "info"
    assert text.endswith(said)


@pytest.mark.parametrize("outcome", ["local", "ok"])
def test_what_llamasup_answered_itself_is_of_no_interest(outcome: str) -> None:
    assert told(model="", route="/metrics", outcome=outcome)[0] == "debug"


def test_a_failure_can_be_found_by_its_request_id() -> None:
    level, _, text, _ = told(status=502, outcome="upstream_failed", request_id="abc-1")
    assert level == "warning"
    assert text.endswith("(upstream failed) [abc-1]")


def test_a_slow_request_says_where_its_time_went() -> None:
    level, event, text, fields = told(
        queue_s=4.0, waited_s=3.9, first_byte_s=12.3, duration_s=45.2, left_out=0
    )
    assert (level, event) == ("warning", "slow_request")
    assert text == (
        "slow: POST /completion: 12.3 s to the first byte, 4.0 s in the queue (3.9 s waiting for the model) "
        "and 8.3 s in llama-server, 45.2 s in total, 10+5 tokens [r]"
    )
    assert fields["first_byte_s"] == 12.3


def test_a_slow_request_without_an_answer_says_so_and_how_many_were_left_out() -> None:
    _, _, text, fields = told(
        queue_s=30.0, first_byte_s=None, duration_s=30.0, tokens_completion=None, left_out=7
    )
    assert text == (
        "slow: POST /completion: no answer in 30.0 s, 30.0 s in the queue [r] "
        "(7 more since the last such line)"
    )
    assert fields["left_out"] == 7


# --- many models -------------------------------------------------------------------------------------------


class Terminal(Heard):
    """And what it shows as going on."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: list[str | None] = ["looking at the models"]

    def going_on(self) -> str | None:
        return self._shown[-1]

    def loading(self, text: str | None) -> None:
        self._shown.append(text)


def many(*specs: ModelSpec, default: str | None = None, loaded: str = "") -> tuple[Terminal, Narrator]:
    ready = SimpleNamespace(instance=SimpleNamespace(state=State.READY), plan=None, load_s=1.5)
    hosted = SimpleNamespace(
        registry=SimpleNamespace(specs={each.id: each for each in specs}, default=default),
        budget={"ram": 1 << 30},
        runners_of=lambda model: [ready] if model == loaded else [],
    )
    terminal = Terminal()
    service = SimpleNamespace(launch=None, runner=None, hosted_models=hosted)
    return terminal, Narrator(cast("View", terminal), cast("Any", service), 0.0)


def ready(*models: str) -> Ready:
    return Ready(TcpAddress("127.0.0.1", 8080), 7, models)


def test_a_broken_model_is_not_among_those_that_are_served() -> None:
    terminal, narrator = many(ModelSpec("a", "/a.gguf"), ModelSpec("b", "/b.gguf", problem="truncated"))
    narrator.notice(ready("a", "b"))
    said = terminal.told[0][2].splitlines()
    assert said[0].startswith("llamasup is ready at http://127.0.0.1:8080 after ")
    assert said[1:] == [
        "  models  1: a",
        "  loaded  none yet: a request loads the model that it names",
        "  broken  b (llamasup status --all shows why)",
        "  memory  1.0 GiB of RAM",
    ]


def test_nothing_is_going_on_any_more_once_it_is_ready() -> None:
    terminal, narrator = many(ModelSpec("a", "/a.gguf"), default="a", loaded="a")
    narrator.notice(ready("a"))
    assert terminal.going_on() is None
    assert "  loaded   a\n" in terminal.told[0][2]
    assert "  default  a, for requests that name no model\n" in terminal.told[0][2]


def test_no_model_at_all_is_told_as_that() -> None:
    terminal, narrator = many()
    narrator.notice(ready())
    assert "  models  none yet" in terminal.told[0][2]


def test_of_two_that_load_the_other_is_still_shown_when_one_serves() -> None:
    terminal, narrator = many(loaded="a")
    narrator.notice(StateChanged("a", State.LOADING, 1))
    narrator.notice(StateChanged("b", State.LOADING, 1))
    assert terminal.going_on() == "loading b"
    narrator.notice(StateChanged("b", State.READY, 1))
    assert terminal.going_on() == "loading a"
    narrator.notice(StateChanged("a", State.READY, 1))
    assert terminal.going_on() is None
    told = [text for level, _, text, _ in terminal.told if level == "info"]
    assert told == ["b is ready", "a is ready (loaded in 1.5 s)"]


def test_a_download_moves_and_is_told_once_where_nothing_moves() -> None:
    terminal, narrator = many()
    for done in (0, 1 << 29):
        narrator.notice(Downloading("org/m", done, 1 << 30, 1 << 20))
    assert [text for _, _, text, _ in terminal.told] == ["downloading org/m (1.0 GiB)"]
    assert terminal.going_on() == "downloading org/m: 512 MiB of 1.0 GiB (50%), 1.0 MiB/s"


def test_a_model_that_cannot_be_started_is_told_with_what_to_do() -> None:
    terminal, narrator = many()
    narrator.notice(Downloading("m", 0, None, 0))
    narrator.notice(LoadFailed("m", ModelInvalid("It is truncated.", remedy="Get it again.")))
    assert terminal.going_on() is None
    assert terminal.told[-1][0] == "warning"
    assert terminal.told[-1][2] == "m: It is truncated.\n  → Get it again."


def test_who_asks_for_a_model_is_told_with_its_name() -> None:
    terminal, narrator = many()
    narrator.asked("load", "bge")
    narrator.asked("reload", "")
    assert [text for _, _, text, _ in terminal.told] == [
        "llamasup load: loading bge.",
        "llamasup reload: reading the config again.",
    ]


def test_mistakes_of_a_config_are_not_llama_servers_words() -> None:
    terminal, narrator = many()
    narrator.notice(
        ConfigRejected(ConfigInvalid("c.yaml has one mistake.", details=("c.yaml:4: max_loaded",)))
    )
    assert (
        terminal.told[0][2]
        == "c.yaml has one mistake. The previous configuration stays in use.\n    c.yaml:4: max_loaded"
    )


@pytest.mark.parametrize(
    ("reason", "for_model", "why"),
    [
        ("memory", "b", "b needs its memory"),
        ("memory", "", "a limit was lowered"),
        ("ttl", "", "its TTL has expired"),
    ],
)
def test_a_model_that_leaves_says_why_and_for_whom(reason: str, for_model: str, why: str) -> None:
    heard = Heard()
    narrator = Narrator(cast("View", heard), cast("Any", SimpleNamespace(launch=None)), 0.0)
    narrator.notice(ModelUnloading("a", reason, for_model))
    assert heard.told == [("info", "unload", f"a is unloaded: {why}", {"model": "a", "reason": reason})]


def test_a_setting_that_counts_from_now_on_is_told_and_models_only_where_they_changed() -> None:
    heard = Heard()
    narrator = Narrator(cast("View", heard), cast("Any", SimpleNamespace(launch=None)), 0.0)
    narrator.notice(ModelsChanged(Changes(unchanged=("a",), settings=("memory", "max_loaded")), ("a",)))
    narrator.notice(ModelsChanged(Changes(unchanged=("a",)), ("a",)))
    assert [text for _, _, text, _ in heard.told] == [
        "Config reloaded: memory, max_loaded changed.",
        "Models: no changes.",
    ]
