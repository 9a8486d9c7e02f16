"""The run of a batch against a scripted server: what is sent, and what is in the output at the end."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import llamasup.features.batch.engine as engine_module
import llamasup.features.batch.schedule as retries_module
from llamasup.core.system.native import native
from llamasup.errors import DiskFull, NotAllowed
from llamasup.features.batch.client import Answer, BatchClient
from llamasup.features.batch.engine import BatchRun, BatchStopped, EngineOptions, Progress
from llamasup.features.batch.index import Counts, Index
from llamasup.features.batch.lines import PromptTemplate, template_of
from llamasup.features.batch.output import Output
from llamasup.features.batch.schedule import PREEMPTED, UNREACHABLE, Refusal, Window

Reply = Callable[[str, int], Answer]

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


def good(prompt: str) -> Answer:
    return Answer(200, json.dumps({"text": prompt, "usage": USAGE}).encode(), "r")


def refused(status: int, cause: str = "", message: str = "why", **more: Any) -> Answer:
    body = json.dumps({"error": {"message": message}}).encode() if status else b""
    return Answer(status, body, "r", Refusal(status, cause, message, retry_after_s=0.001), **more)


class Server(BatchClient):
    """Answers as ``reply`` says, from the prompt and how often it was sent."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.sent: Counter[str] = Counter()
        self.order: list[str] = []
        self.at_work = 0
        self.most_at_work = 0
        self.company: dict[str, int] = {}
        self.at_work_at: list[int] = []
        self.hangs: set[str] = set()
        self.on_hang: Callable[[], object] = lambda: None
        self.others_end = asyncio.Event()  # each line but one
        self.streams: list[bool] = []

    async def send(self, url: str, body: bytes, *, stream: bool = False) -> Answer:
        prompt = str(json.loads(body)["prompt"])
        self.sent[prompt] += 1
        self.order.append(prompt)
        self.streams.append(stream)
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        self.company[prompt] = self.at_work
        self.at_work_at.append(self.at_work)
        try:
            if prompt in self.hangs:
                await self.others_end.wait()
                self.on_hang()
                await asyncio.Event().wait()
            for _ in range(3):
                await asyncio.sleep(0)
            return self._reply(prompt, self.sent[prompt])
        finally:
            self.at_work -= 1
            if self.at_work == 1 and len(self.order) >= 8:
                self.others_end.set()


class Batch:
    """Files of a batch with the prompts ``p0``, ``p1``, … for these models, in turns. May ``run`` again."""

    def __init__(self, folder: Path, count: int, models: tuple[str, ...] = ("",)) -> None:
        self.source = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        lines = [
            {
                "custom_id": f"id{number}",
                "url": "/v1/completions",
                "body": {"prompt": f"p{number}", "model": models[number % len(models)]},
            }
            for number in range(count)
        ]
        self.source.write_text("\n".join(map(json.dumps, lines)))
        self.template: PromptTemplate | None = None
        self.progress: list[str] = []
        self.waiting: list[str] = []
        self.on_progress: Callable[[], object] = lambda: None
        self.last = Progress()

    def run(
        self, reply: Reply, *, act: Callable[[BatchRun, Server], None] | None = None, **options: Any
    ) -> Server:
        server = Server(reply)
        with ExitStack() as stack:
            index = stack.enter_context(Index(Path(f"{self.output}.index")))
            with self.source.open("rb") as file:
                index.read_input(file, template=self.template)
            output = Output(self.output)
            stack.callback(output.close)
            output.settle(index)
            source = os.open(self.source, os.O_RDONLY)
            stack.callback(os.close, source)

            async def go() -> None:
                batch = BatchRun(
                    index,
                    output,
                    source,
                    server,
                    EngineOptions(**options),
                    template=self.template,
                    on_progress=self._note,
                )
                self.last = batch.progress
                if act is not None:
                    act(batch, server)
                await batch.run()

            asyncio.run(go())
        return server

    def _note(self, progress: Progress) -> None:
        self.progress.append(progress.state)
        self.waiting.append(progress.waiting)
        self.on_progress()

    def counts(self) -> Counts:
        with Index(Path(f"{self.output}.index")) as index:
            return index.counts()

    def lines(self) -> dict[str, Any]:
        """By id; each id has one line."""
        found: dict[str, Any] = {}
        for line in self.output.read_text().splitlines():
            written = json.loads(line)
            assert written["custom_id"] not in found
            found[written["custom_id"]] = written
        return found


def test_each_line_gets_its_answer(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 1200)
    server = batch.run(lambda prompt, _: good(prompt))
    lines = batch.lines()
    assert len(lines) == 1200
    assert lines["id7"]["response"]["body"]["text"] == "p7"
    assert set(server.sent.values()) == {1}
    assert server.most_at_work > 4
    assert batch.counts() == Counts(1200, 1200, 0)
    assert (batch.last.tokens_prompt, batch.last.tokens_cached) == (6000, 3600)
    assert batch.last.tokens_completion == 2400
    assert batch.last.left == 0


def test_run_that_is_over_sends_nothing(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 3)
    batch.run(lambda prompt, _: good(prompt))
    assert not batch.run(lambda prompt, _: good(prompt)).sent


def test_first_answers_are_streams_and_short_ones_are_not(tmp_path: Path) -> None:
    server = Batch(tmp_path, 50).run(lambda prompt, _: good(prompt), concurrency=1)
    assert server.streams == [True] + [False] * 49


def test_requests_in_flight_are_as_many_as_asked(tmp_path: Path) -> None:
    assert Batch(tmp_path, 50).run(lambda prompt, _: good(prompt), concurrency=7).most_at_work == 7


BROKE = "the connection broke"


@pytest.mark.parametrize(
    ("answer", "times", "status", "error"),
    [
        (refused(400), 1, 400, None),
        (refused(500), 3, 500, None),
        (refused(0), 10, None, {"code": "no_answer", "message": "why"}),
        # A line that breaks each connection to its server
        (
            refused(502, "upstream_unreachable", BROKE),
            *(3, None, {"code": "server_crashed", "message": BROKE}),
        ),
    ],
)
def test_line_that_always_fails_gets_its_error(
    tmp_path: Path, answer: Answer, times: int, status: int | None, error: Any
) -> None:
    batch = Batch(tmp_path, 10)
    server = batch.run(lambda prompt, _: answer if prompt == "p5" else good(prompt))
    assert server.sent["p5"] == times
    body = {"error": {"message": "why"}}
    response = None if status is None else {"status_code": status, "request_id": "r", "body": body}
    line = batch.lines()["id5"]
    assert (line["response"], line["error"]) == (response, error)
    assert batch.counts() == Counts(10, 9, 1)


def test_error_of_the_server_may_be_over_at_the_next_try(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 3)
    assert batch.run(lambda prompt, times: refused(500) if times == 1 else good(prompt)).sent == {
        f"p{number}": 2 for number in range(3)
    }
    assert batch.counts() == Counts(3, 3, 0)


def test_request_that_gives_way_runs_again_without_a_limit(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 2)
    server = batch.run(
        lambda prompt, times: refused(503, PREEMPTED, events=4) if times < 30 else good(prompt), concurrency=1
    )
    assert server.sent == {"p0": 30, "p1": 30}
    assert (batch.last.put_back, batch.last.events_lost) == (58, 232)


def test_line_that_kills_its_server_is_found_and_holds_up_no_other(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 40)
    crash = refused(502, "segmentation_fault", "llama-server crashed: segmentation fault")

    def reply(prompt: str, times: int) -> Answer:
        # The first time, all that were in flight with p5 get the same error.
        return crash if prompt == "p5" or (times == 1 and prompt in {"p4", "p6"}) else good(prompt)

    server = batch.run(reply, concurrency=4)
    assert server.sent["p5"] == 3
    assert server.company["p5"] == 1  # alone at the end
    assert set(server.order[40:]) == {"p4", "p5", "p6"}
    assert batch.lines()["id5"]["error"] == {
        "code": "server_crashed",
        "message": "llama-server crashed: segmentation fault",
    }
    assert batch.counts() == Counts(40, 39, 1)


def test_run_stops_if_no_server_comes_and_keeps_what_is_done(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 30)
    with pytest.raises(BatchStopped, match=r"No line has been served for 0.05 s: why") as caught:
        batch.run(
            lambda prompt, _: refused(503, "crash_loop") if prompt > "p5" else good(prompt), patience_s=0.05
        )
    assert caught.value.exit_code == 75
    done = batch.counts().done
    assert done
    server = batch.run(lambda prompt, _: good(prompt))
    assert len(server.sent) == 30 - done
    assert len(batch.lines()) == 30


def test_line_that_a_limit_never_lets_through_ends_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries_module, "MAX_LIMITED_S", 0.01)
    batch = Batch(tmp_path, 20)
    server = batch.run(lambda prompt, _: refused(429) if prompt == "p5" else good(prompt))
    assert 2 < server.sent["p5"] < 20
    assert batch.lines()["id5"]["response"]["status_code"] == 429
    assert batch.counts() == Counts(20, 19, 1)


def test_fewer_lines_are_in_flight_after_the_refusal_of_a_limit(tmp_path: Path) -> None:
    def reply(prompt: str, times: int) -> Answer:
        return refused(429) if times == 1 else good(prompt)

    for name in ("as many as possible", "three"):
        (tmp_path / name).mkdir()
    server = Batch(tmp_path / "as many as possible", 12).run(reply)
    assert server.at_work_at[3:8] == [4, 1, 1, 1, 1]
    server = Batch(tmp_path / "three", 12).run(reply, concurrency=3)
    assert server.at_work_at[2:6] == [3, 1, 2, 3]


def test_model_that_refuses_all_lines_holds_up_no_other_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SKIP_AFTER_S", 0.0)
    batch = Batch(tmp_path, 30, models=("away", "big", "small"))

    def reply(prompt: str, times: int) -> Answer:
        others = {f"p{number}" for number in range(30) if number % 3}
        is_away = prompt not in others and not others <= served
        if not is_away:
            served.add(prompt)
        return refused(503, "crash_loop") if is_away else good(prompt)

    served: set[str] = set()
    batch.run(reply)
    assert batch.counts() == Counts(30, 30, 0)


def test_next_model_does_not_run_while_one_loads(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 12, models=("first", "second"))
    refusals = iter(range(20))
    server = batch.run(
        lambda prompt, _: good(prompt) if next(refusals, None) is None else refused(503, "loading")
    )
    assert {int(prompt[1:]) % 2 for prompt in server.order[:20]} == {0}
    assert batch.counts() == Counts(12, 12, 0)


def test_only_a_few_models_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SKIP_AFTER_S", 0.0)
    monkeypatch.setattr(engine_module, "MAX_SKIPPED", 1)
    batch = Batch(tmp_path, 3, models=("a", "b", "c"))
    away = Answer(503, b"", "r", Refusal(503, retry_after_s=0.3))

    def reply(prompt: str, times: int) -> Answer:
        return good(prompt) if prompt == "p2" else away

    with pytest.raises(BatchStopped):
        batch.run(reply, concurrency=1, patience_s=0.2)
    assert batch.counts().done == 0


def test_waiting_for_other_clients_is_no_trouble(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 1)
    batch.run(
        lambda prompt, times: refused(503, "batch_waits") if times < 40 else good(prompt), patience_s=0.02
    )
    assert batch.counts().done == 1


def test_stop_keeps_what_is_done_and_the_next_run_continues(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 2000)

    def act(run: BatchRun, server: Server) -> None:
        def reply(prompt: str, times: int) -> Answer:
            if len(server.order) >= 900:
                run.stop()
            return good(prompt)

        server._reply = reply

    batch.run(lambda prompt, _: good(prompt), act=act)
    done = batch.counts().done
    assert 0 < done < 2000
    assert len(batch.lines()) == done
    batch.run(lambda prompt, _: good(prompt))
    assert len(batch.lines()) == 2000


def test_cancellation_ends_the_requests_and_saves(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 10)

    def act(run: BatchRun, server: Server) -> None:
        server.hangs.add("p3")
        task = asyncio.current_task()
        assert task is not None

        server.on_hang = task.cancel

    with pytest.raises(asyncio.CancelledError):
        batch.run(lambda prompt, _: good(prompt), act=act)
    assert batch.counts().done > 0
    assert len(batch.lines()) == batch.counts().done


def test_full_disk_stops_the_run_and_the_next_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(tmp_path, 1500)
    blocks: list[int] = []
    append = Output.append

    def full(self: Output, lines: Any) -> int:
        blocks.append(threading.get_ident())
        if len(blocks) == 2:
            raise DiskFull("No space is left.")
        return append(self, lines)

    monkeypatch.setattr(Output, "append", full)
    with pytest.raises(DiskFull):
        batch.run(lambda prompt, _: good(prompt))
    assert threading.get_ident() not in blocks
    assert 0 < len(batch.lines()) < 1500
    batch.run(lambda prompt, _: good(prompt))
    assert len(batch.lines()) == 1500


def test_index_and_long_lines_are_read_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop may be that of the proxy."""
    batch = Batch(tmp_path, 3)
    text = batch.source.read_text()
    batch.source.write_text(text.replace('"p1"', json.dumps("p" * 100_000)))
    calls: list[tuple[str, bool]] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, threading.get_ident() == main))
            return function(*arguments, **options)

        return call

    def act(run: BatchRun, server: Server) -> None:
        for name in ("counts", "next_model", "lines_of", "save"):
            monkeypatch.setattr(Index, name, noted(name, getattr(Index, name)))
        monkeypatch.setattr(native, "read_at", noted("read_at", native.read_at))

    main = threading.get_ident()
    batch.run(lambda prompt, _: good(prompt), act=act)
    by_name = {name: [is_main for other, is_main in calls if other == name] for name, _ in calls}
    assert sorted(by_name.pop("read_at")) == [False, True, True]
    assert by_name.keys() == {"counts", "next_model", "lines_of", "save"}
    assert not any(is_main for found in by_name.values() for is_main in found)


def test_input_that_changes_during_the_run_stops_it(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 5)

    def act(run: BatchRun, server: Server) -> None:
        batch.source.write_bytes(batch.source.read_bytes().replace(b"p3", b"p7"))

    with pytest.raises(BatchStopped, match="Line 4 of the input has changed"):
        batch.run(lambda prompt, _: good(prompt), act=act)


def test_prompts_are_sent_as_their_template_says(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 0)
    batch.template = template_of('{"prompt": "Say $word"}', "/v1/completions")
    batch.source.write_text('{"word": "fox"}\n{"word": "owl"}')
    assert set(batch.run(lambda prompt, _: good(prompt)).sent) == {"Say fox", "Say owl"}
    batch.source.write_text('{"word": "fox"}\n{"word": "owl"}\n{"word": "elk"}')

    def act(run: BatchRun, server: Server) -> None:
        batch.source.write_bytes(batch.source.read_bytes().replace(b"elk", b"e\nk"))

    with pytest.raises(BatchStopped, match="Line 3 of the input has changed"):
        batch.run(lambda prompt, _: good(prompt), act=act)


def test_no_line_starts_outside_of_its_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(tmp_path, 3)
    now = datetime.now(UTC).astimezone()
    monkeypatch.setattr(engine_module, "_WINDOW_CHECK_S", 0.01)
    opens = (now + timedelta(hours=2)).time().replace(tzinfo=None)
    closes = (now + timedelta(hours=3)).time().replace(tzinfo=None)

    def act(run: BatchRun, server: Server) -> None:
        batch.on_progress = lambda: run.stop() if len(batch.progress) == 3 else None

    server = batch.run(lambda prompt, _: good(prompt), act=act, only_between=Window(opens, closes))
    assert not server.sent
    assert batch.progress == ["outside of its hours"] * 3
    assert len(batch.run(lambda prompt, _: good(prompt), only_between=Window(closes, opens)).sent) == 3


@pytest.mark.parametrize("why", ["closed hours", "nobody listens"])
def test_run_says_why_it_waits_before_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(engine_module, "_WINDOW_CHECK_S", 3600.0)
    opens = (datetime.now(UTC).astimezone() + timedelta(hours=2)).time().replace(tzinfo=None)
    closes = opens.replace(hour=(opens.hour + 1) % 24)
    batch = Batch(tmp_path, 1)
    kept: list[object] = []

    def act(run: BatchRun, server: Server) -> None:
        def note() -> None:
            if batch.waiting[-1]:
                with Index(Path(f"{batch.output}.index"), readonly=True) as index:
                    kept.append(index.fact("waiting"))
                run.stop()

        batch.on_progress = note

    nobody = Answer(0, b"", "", Refusal(0, UNREACHABLE, "nobody\nlistens", retry_after_s=3600.0))
    window = Window(opens, closes) if why == "closed hours" else None
    batch.run(lambda *_: nobody, act=act, only_between=window)
    said = r"nobody\nlistens" if window is None else f"its hours begin at {opens:%H:%M}"
    assert batch.waiting[-1] == said
    assert kept == [said]


def test_run_that_has_waited_says_that_it_runs(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 1)
    batch.run(lambda prompt, times: refused(503, "loading") if times < 3 else good(prompt))
    assert [*dict.fromkeys(batch.waiting)] == ["", "why"]
    assert batch.waiting[-1] == ""


def test_answer_that_breaks_its_schema_is_asked_for_once_more(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 3)
    text = batch.source.read_text().replace("/v1/completions", "/v1/chat/completions")
    batch.source.write_text(
        text.replace('"body": {', '"body": {"response_format": {"type": "json_object"}, ')
    )

    def reply(prompt: str, times: int) -> Answer:
        is_right = prompt == "p0" or (prompt == "p1" and times == 2)
        message = {"message": {"content": "{}" if is_right else "{"}}
        return Answer(200, json.dumps({"choices": [message]}).encode())

    server = batch.run(reply)
    assert server.sent == {"p0": 1, "p1": 2, "p2": 2}
    assert batch.counts() == Counts(3, 2, 1)
    line = batch.lines()["id2"]
    assert line["error"]["code"] == "schema_mismatch"
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "{"
    (tmp_path / "out.jsonl.index").unlink()
    assert not batch.run(reply).sent
    assert batch.counts() == Counts(3, 2, 1)


def test_key_that_is_refused_stops_the_run_and_spoils_no_line(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 30)
    with pytest.raises(NotAllowed, match="refuses the API key: why"):
        batch.run(lambda prompt, _: refused(401) if prompt > "p2" else good(prompt), concurrency=1)
    assert batch.counts().failed == 0
    assert 0 < batch.counts().done < 30


def test_llamasup_that_is_away_fails_no_line(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 2)
    away = refused(0, UNREACHABLE)
    server = batch.run(lambda prompt, times: away if times < 30 else good(prompt), concurrency=1)
    assert server.sent == {"p0": 30, "p1": 30}
    assert batch.counts().done == 2


@pytest.mark.parametrize(
    ("ended_here", "taken_s", "rates"),
    [(0, 2.0, (50.0, None)), (5, 2.0, (50.0, 6.0)), (5, 0.0, (100_000.0, 0.003))],
)
def test_rates_are_those_of_this_run(
    ended_here: int, taken_s: float, rates: tuple[float, float | None]
) -> None:
    progress = Progress(total=20, done=4, failed=1, ended_here=ended_here, tokens_completion=100, began_s=7.0)
    assert progress.left == 15
    assert progress.rates(7.0 + taken_s) == pytest.approx(rates)
