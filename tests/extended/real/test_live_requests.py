"""The requests in flight of a real llama-server, and their cancellation."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from llamasup.core.proxy.live.requests import FRESH_S
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit.patience import eventually
from tests.kit.ports import free_port
from tests.kit.runtimes import wrapped_runtime
from tests.real.test_queueing import CONTEXT

LONG = 3_000  # tokens
ENDLESS = 10_000_000


@pytest.fixture
def running(runtime: str, tiny_model: Path) -> Iterator[Llamasup]:
    options = ("--runtime", runtime, "--parallel", "2", "--ctx-size", CONTEXT, "--", "--context-shift")
    with llamasup(tiny_model, *options) as llamasup_process:
        llamasup_process.wait_for("ready")
        yield llamasup_process
        assert llamasup_process.stop() == 0


@pytest.fixture
def control(running: Llamasup) -> Iterator[ControlClient]:
    with ControlClient(ControlAddress(socket=select_running(discover(), running.pid).socket)) as client:
        yield client


class Reader:
    """A client of a long answer, in a thread. ``tokens``: the events of its stream so far."""

    def __init__(
        self, running: Llamasup, request_id: str, *, stream: bool = True, tokens: int = LONG
    ) -> None:
        self.id = request_id
        self.tokens = 0
        self._lines: list[str] = []
        self.status = 0
        self.ended = threading.Event()
        self._url = f"{running.url}/completion"
        self._body = {"prompt": "Once", "n_predict": tokens, "ignore_eos": True, "stream": stream}
        self._headers = {"X-Request-Id": request_id}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=PATIENCE_S
            ) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self._lines.append(line)
                    self.tokens += line.startswith("data: {") and '"error"' not in line
        except httpx.HTTPError:  # a stream that ends with an error has no last chunk
            pass
        finally:
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(self._lines)


def live(control: ControlClient) -> Mapping[str, Mapping[str, Any]]:
    return {request["id"]: request for request in control.requests()["live"]}


def busy_slots(running: Llamasup) -> int:
    slots = httpx.get(f"{running.url}/slots", timeout=PATIENCE_S).json()
    return sum(slot["is_processing"] for slot in slots)


def last_outcome(control: ControlClient) -> tuple[str, str]:
    (last,) = control.requests(ended=1)["ended"]
    return last["request_id"], last["outcome"]


def test_each_stream_has_its_own_tokens(running: Llamasup, control: ControlClient) -> None:
    """A slot is never behind its client. The first is far ahead of the second, so they are not exchanged."""
    first = Reader(running, "first", tokens=ENDLESS)
    eventually(lambda: first.tokens > 200)
    second = Reader(running, "second", tokens=ENDLESS)
    eventually(lambda: second.tokens > 20)
    checked = Counter[str]()

    def each_is_checked() -> bool:
        before = first.tokens, second.tokens
        shown = live(control)
        for name, least in zip(("first", "second"), before, strict=True):
            request = shown[name]
            if (tokens := request["tokens_completion"]) is not None:  # else llama-server was too slow
                assert least <= tokens + 1, (name, least, tokens)
                assert request["phase"] == "generating"
                assert request["tokens_prompt"] is not None
                checked[name] += 1
        return min(checked["first"], checked["second"]) >= 3

    eventually(each_is_checked, every_s=FRESH_S + 0.05)  # so that the slots are read each time
    for reader in (first, second):
        assert not reader.ended.is_set()
        control.cancel(reader.id)
        assert reader.ended.wait(PATIENCE_S)
    lengths = {"third": LONG, "fourth": LONG // 2}
    for reader in [Reader(running, name, tokens=tokens) for name, tokens in lengths.items()]:
        assert reader.ended.wait(PATIENCE_S)
    ended = {request["request_id"]: request for request in control.requests(ended=10)["ended"]}
    assert {name: ended[name]["tokens_completion"] for name in lengths} == lengths


def test_waiting_request_has_a_position(running: Llamasup, control: ControlClient) -> None:
    holders = [Reader(running, f"r{number}", tokens=ENDLESS) for number in range(2)]
    eventually(lambda: all(reader.tokens for reader in holders))
    waiting = Reader(running, "waiting", stream=False)
    eventually(lambda: live(control).get("waiting", {}).get("phase") == "queued")
    assert live(control)["waiting"]["position"] == 1
    control.cancel("waiting")
    assert waiting.ended.wait(PATIENCE_S)
    assert (waiting.status, json.loads(waiting.text)["error"]["cause"]) == (499, "cancelled")
    for number, reader in enumerate(holders):
        control.cancel(f"r{number}")
        assert reader.ended.wait(PATIENCE_S)


def test_slot_of_a_cancelled_stream_is_free_at_once(running: Llamasup, control: ControlClient) -> None:
    readers = {name: Reader(running, name, tokens=ENDLESS) for name in ("first", "second")}
    eventually(lambda: all(reader.tokens for reader in readers.values()))
    (cancelled,) = control.cancel("first")["cancelled"]
    assert (cancelled["model"], cancelled["phase"]) == ("tiny", "generating")
    assert readers["first"].ended.wait(PATIENCE_S)
    assert '"cause":"cancelled"' in readers["first"].text
    assert last_outcome(control) == ("first", "cancelled")
    eventually(lambda: busy_slots(running) < 2)
    assert not readers["second"].ended.is_set()  # only the cancelled one has ended
    third = Reader(running, "third", tokens=100)  # in the free slot
    assert third.ended.wait(PATIENCE_S)
    assert third.tokens >= 100
    assert last_outcome(control) == ("third", "ok")
    control.cancel("second")
    assert readers["second"].ended.wait(PATIENCE_S)


@pytest.mark.one_runtime
def test_request_that_waits_is_in_the_last_hour_also_if_it_never_gets_a_server(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    waits = f'case "$*" in *--model*) until [ -e {gate} ]; do sleep 0.1; done ;; esac'
    wrapper = wrapped_runtime(tmp_path, runtime, waits)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with llamasup(tiny_model, "--runtime", wrapper, "--port", str(port)) as starting:
        eventually(lambda: waited_in_vain(address))
        socket = select_running(discover(), starting.pid).socket
        transport = httpx.HTTPTransport(uds=socket)
        with httpx.Client(transport=transport, base_url="http://x", timeout=PATIENCE_S) as control:

            def is_in_the_last_hour() -> bool:
                ended = control.get("/llamasup/v1/requests?ended=1").json()["ended"]
                series: Mapping[str, list[float]] = control.get("/llamasup/v1/history").json()["series"]
                return ended != [] and sum(series["queued"]) > 0.0

            # One that came early may have left before the proxy had begun: then it has not waited.
            eventually(lambda: waited_in_vain(address) and is_in_the_last_hour())
        gate.touch()
        starting.wait_for("ready")
        assert starting.stop() == 0


def waited_in_vain(address: str) -> bool:
    """Send a request whose client leaves after a second. False if llamasup does not listen yet."""
    try:
        httpx.post(f"{address}/completion", json={"prompt": "Once", "n_predict": 1}, timeout=1.0)
    except httpx.ReadTimeout:
        return True
    except httpx.ConnectError:
        return False
    raise AssertionError("it was answered")
