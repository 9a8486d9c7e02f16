"""The spans of requests to a real llama-server, at a trace collector on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.features.tracing.collector import Collector, collector, plain
from tests.features.tracing.records import PARENT, TRACE
from tests.kit.patience import eventually
from tests.kit.runtimes import wrapped_runtime

LONG = 2000  # tokens
PAUSES_S = 10.0  # of all processes on a busy machine
SECRET = "a word of the prompt"


def environ(url: str, **more: str) -> dict[str, str]:
    return {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SERVICE_NAME": "models", **more}


def ask(running: Llamasup, name: str, tokens: int, *, stream: bool = False) -> int:
    """The status of a request."""
    headers = {"X-Request-Id": name, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": SECRET, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    url = f"{running.url}/v1/completions?query={SECRET}"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as response:
        response.read()
        return response.status_code


def requests_of(received: Collector) -> dict[str, tuple[Span, dict[str, Any], dict[str, float]]]:
    """The span of each request by its id, with its attributes and the seconds of its children in order."""
    found = {}
    for root in received.spans:
        if root.name != "llamasup.request":
            continue
        children = [span for span in received.spans if span.parent_span_id == root.span_id]
        seconds = {
            span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in children
        }
        assert all(span.trace_id == root.trace_id for span in children)
        attributes = plain(root.attributes)
        found[attributes["llamasup.request_id"]] = root, attributes, seconds
    return found


def phases(running: Llamasup) -> Sequence[str]:
    """Of the requests in flight, the oldest first."""
    address = ControlAddress(socket=select_running(discover(), running.pid).socket)
    with ControlClient(address) as control:
        return [request["phase"] for request in control.requests()["live"]]


def test_phases_of_a_request_add_up(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    """A stream; a plain request that waits for its slot; one that waits for the start after a crash."""
    crashed, go_on = tmp_path / "crashed", tmp_path / "go_on"
    os.mkfifo(go_on)
    wrapper = wrapped_runtime(tmp_path, runtime, f"[ -e {crashed} ] && read -r _ < {go_on}")
    options = ("--runtime", wrapper, "--parallel", "1")
    with collector() as received, llamasup(tiny_model, *options, env=environ(received.url)) as running:
        running.wait_for("ready")
        began_ns = time.time_ns()
        with ThreadPoolExecutor() as clients:
            (child,) = running.children()
            child.suspend()  # so that the first one cannot end before the second one waits for its slot
            stream = clients.submit(ask, running, "stream", LONG, stream=True)
            eventually(lambda: phases(running) == ["prompt"])
            plain_one = clients.submit(ask, running, "plain", 300)
            eventually(lambda: phases(running) == ["prompt", "queued"])
            released_ns = time.time_ns()
            child.resume()
            assert stream.result(PATIENCE_S) == 200
            assert plain_one.result(PATIENCE_S) == 200
            crashed.touch()
            child.send_signal(signal.SIGKILL)
            running.wait_for("exit")
            after = clients.submit(ask, running, "after", 4)
            eventually(lambda: phases(running) == ["loading"])
            go_on.write_text("\n")
            assert after.result(PATIENCE_S) == 200
        assert httpx.get(f"{running.url}/health", timeout=PATIENCE_S).status_code == 200
        assert (
            "llamasup_traces_dropped_total 0.0"
            in httpx.get(f"{running.url}/metrics", timeout=PATIENCE_S).text
        )
        assert running.stop() == 0
        ended_ns = time.time_ns()
    spans = requests_of(received)
    assert set(spans) == {"stream", "plain", "after"}
    assert received.resource()["service.name"] == "models"
    for root, attributes, seconds in spans.values():
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
        assert began_ns < root.start_time_unix_nano < root.end_time_unix_nano < ended_ns
        duration_s = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
        assert sum(seconds.values()) == pytest.approx(duration_s, abs=1e-6)
        assert (attributes["gen_ai.request.model"], attributes["gen_ai.operation.name"]) == (
            "tiny",
            "text_completion",
        )
        assert attributes["gen_ai.usage.input_tokens"] > 4
        assert SECRET not in str(root)
    for name, tokens in (("stream", LONG), ("plain", 300), ("after", 4)):
        assert spans[name][1]["gen_ai.usage.output_tokens"] == tokens
    for name, tokens in (("stream", LONG), ("plain", 300)):
        _, attributes, seconds = spans[name]
        assert list(seconds) == ["queue", "prompt", "generation"]
        expected_s = tokens / attributes["llamasup.tokens_per_s"]
        # It is longer if llamasup or the client pauses after the first byte.
        assert 0.99 * expected_s <= seconds["generation"] <= 1.5 * expected_s + PAUSES_S
    # There is one slot, so the second request waits in the queue for the end of the first, whose tokens
    # took ``generation_s`` after the server was released.
    first, second = spans["stream"][0], spans["plain"][0]
    generation_s = LONG / spans["stream"][1]["llamasup.tokens_per_s"]
    sent_ns = second.start_time_unix_nano + spans["plain"][2]["queue"] * 1e9
    assert second.start_time_unix_nano < first.end_time_unix_nano < sent_ns + PAUSES_S * 1e9
    assert sent_ns > released_ns + 0.99 * generation_s * 1e9
    assert next(iter(spans["after"][2])) == "load"


@pytest.mark.one_runtime
def test_collector_that_hangs_or_is_missing_delays_neither_requests_nor_the_end(
    runtime: str, tiny_model: Path
) -> None:
    def run(url: str, until: Callable[[Llamasup], object]) -> tuple[str, float]:
        """What llamasup wrote, and how long its end took."""
        patient = environ(url, OTEL_EXPORTER_OTLP_TIMEOUT="600000")  # ms
        with llamasup(tiny_model, "--runtime", runtime, env=patient) as running:
            running.wait_for("ready")
            assert {ask(running, f"r-{number}", 2) for number in range(20)} == {200}
            until(running)
            began_s = time.monotonic()
            assert running.stop() == 0
            return running.stderr_text, time.monotonic() - began_s

    def has_warned(running: Llamasup) -> None:
        eventually(lambda: "spans cannot be sent" in running.stderr_text)

    with collector() as working:
        _, working_s = run(working.url, lambda _: working.asked.wait(PATIENCE_S))
    text, dead_s = run(working.url, has_warned)
    assert text.count("spans cannot be sent") == 1
    assert "Connection refused" in text
    with collector() as hanging:
        hanging.hangs = True
        _, hanging_s = run(hanging.url, lambda _: hanging.asked.wait(PATIENCE_S))
    print(f"end: {working_s:.2f} s, dead collector {dead_s:.2f} s, hanging collector {hanging_s:.2f} s")
    for ended_s in (dead_s, hanging_s):  # it waits for the collector for at most one second, not 600
        assert ended_s < working_s + PATIENCE_S / 2
