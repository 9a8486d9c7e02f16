"""How far the load of a real llama-server is, as clients and users see it, and when it will end."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import llamasup
from llamasup.core.config.config_keys import Config, Http
from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from llamasup.core.planning.measured.stores import load_history, save_history
from llamasup.core.settings.model import ModelEntry
from llamasup.service import options
from tests.e2e.driver import PATIENCE_S, command, run_to_end
from tests.e2e.driver import llamasup as llamasup_process
from tests.extended.real.slowed import LoadedTooSoon, retried, slowed
from tests.kit.models import write_large_decoder
from tests.kit.patience import eventually
from tests.kit.runtimes import not_mapped

CHAT = {"model": "large", "prompt": "Once", "max_tokens": 2}
OPTIONS = ("--ctx-size", "512", "--parallel", "1", "--")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = write_large_decoder(
        tmp_path_factory.mktemp("large") / "large.gguf", 300_000_000, quantization="F16"
    )
    yield path
    path.unlink()


ENOUGH_LEFT = 80  # percent: later, the load may be over before the test has looked


def next_progress(events: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    for event in events:
        if event["event"] == "progress" and event["percent"] is not None:
            if event["percent"] > ENOUGH_LEFT:
                break
            return event
        if event.get("state") == "ready":
            break
    raise LoadedTooSoon


def check_course(events: list[Mapping[str, Any]]) -> None:
    """The percent rises, and the remaining time grows only with a reason."""
    assert events[-1]["percent"] > events[0]["percent"]
    for before, after in pairwise(events):
        assert before["percent"] <= after["percent"] <= 99
        assert after["eta_s"] <= before["eta_s"] or after["reason"]


def test_clients_of_a_model_that_loads_see_how_far_it_is(
    runtime: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "STREAM_KEEPALIVE_S", 0.1)
    entry = ModelEntry(path=str(large), ctx_size=512, parallel=1, max_queued=1, extra=not_mapped(runtime))
    config = Config(models={"large": entry}, http=Http(stream_keepalive=True))

    def attempt() -> None:
        with (
            llamasup.serve(config=config, runtime=runtime) as server,
            ThreadPoolExecutor(1) as clients,
            slowed(os.getpid()) as freed,
        ):
            comments = []

            def stream() -> str:
                with server.client.stream(
                    "POST", "/v1/completions", json={**CHAT, "stream": True}
                ) as response:
                    assert response.status_code == 200
                    for line in (lines := response.iter_lines()):
                        if line.startswith(":"):
                            comments.append(line)
                        elif line:
                            break
                    return "\n".join([line, *lines])

            events = server.events()
            answer = clients.submit(stream)
            course = [next_progress(events)]

            with freed.stopped:  # the server does not go on meanwhile
                (model,) = server.status()["models"]
                if model["state"] == "ready" or model["load"]["percent"] > ENOUGH_LEFT:
                    raise LoadedTooSoon
                with ControlClient(
                    ControlAddress(socket=select_running(discover(), os.getpid()).socket)
                ) as control:
                    (live,) = control.requests()["live"]
                assert live["phase"] == "loading"
                assert live["percent"] >= course[0]["percent"]
                assert live["eta_s"] == live["expected_wait_s"] > 0

                (model,) = server.status()["models"]
                assert model["state"] in ("starting", "loading")
                assert 0 < live["percent"] <= model["load"]["percent"] < 100
                assert model["load"]["eta_s"] > 0
                assert model["load"]["elapsed_s"] > 0

                refused = server.client.post("/v1/completions", json=CHAT)  # the queue is full
                error = refused.json()["error"]
                assert (refused.status_code, error["cause"]) == (503, "waiting_room_full")
                assert 0 < error["percent"] < 100
                assert int(refused.headers["retry-after"]) >= int(error["eta_s"])
                assert re.search(r"; \d+ % loaded, about \d+ s left$", error["message"])

            course += [next_progress(events) for _ in range(2)]
            eventually(lambda: comments or answer.done(), "a comment in the stream")
            if not comments:
                raise LoadedTooSoon
            freed.set()
            assert answer.result(PATIENCE_S).endswith("data: [DONE]\n")
            check_course(course)
            shown = [line for line in comments if re.fullmatch(r": loading \d+ %, \d+ s left", line)]
            assert shown, comments
            (model,) = server.status()["models"]
            assert (model["state"], model["load"]) == ("ready", None)

    retried(attempt)


@pytest.mark.one_runtime
def test_live_line_and_ps_show_how_far_the_load_is(runtime: str, large: Path) -> None:
    def attempt() -> None:
        master, slave = os.openpty()
        process = subprocess.Popen(
            command("run", str(large), "--port", "0", "--runtime", runtime, *OPTIONS, *not_mapped(runtime)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=slave,
        )
        os.close(slave)
        try:
            with slowed(process.pid) as freed:
                shown = ""
                while not (found := re.search(r"loading large: (\d+) %, (\d+) s left", shown)):
                    if "large is ready" in shown:
                        raise LoadedTooSoon
                    shown += os.read(master, 65_536).decode("utf-8", "replace")
                assert 0 < int(found[1]) < 100
                with freed.stopped:
                    table = run_to_end("ps", "--pid", str(process.pid)).stdout
                if re.search(r"^large +ready ", table, re.M):
                    raise LoadedTooSoon
                assert re.search(r"^large +\w+ \d+ %, \d+ s ", table, re.M), table
                freed.set()
                while "large is ready" not in shown:
                    shown += os.read(master, 65_536).decode("utf-8", "replace")
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)
            os.close(master)
        assert process.returncode == 0

    retried(attempt)


@pytest.mark.one_runtime
def test_next_load_of_a_file_is_estimated_from_its_first_moment_on(runtime: str, large: Path) -> None:
    arguments = (str(large), "--runtime", runtime, *OPTIONS, *not_mapped(runtime))
    with llamasup_process(*arguments) as running:
        running.wait_for("ready")
        eventually(lambda: load_history(large).times, "the record of this load")
        assert running.stop() == 0
    (times,) = (history := load_history(large)).times
    assert times.weights_bytes >= 0.9 * large.stat().st_size
    assert times.total_s > times.weights_s >= 0.0  # 0: the whole file came between two looks

    # As from a machine that took longer for each stage than any machine may pause here: a speed that was
    # measured before the first event cannot hide it.
    slow = replace(times, begin_s=100.0, weights_s=1000.0, memory_s=1000.0, warm_up_s=1000.0)
    save_history(large, replace(history, times=(slow,)))

    def attempt() -> None:
        with llamasup_process(*arguments) as running, slowed(running.pid):
            first = running.wait_for("progress")
            if first["eta_s"] <= slow.memory_s + slow.warm_up_s:
                raise LoadedTooSoon
            assert first["eta_s"] <= slow.total_s
            assert first["reason"] is None

    retried(attempt)
