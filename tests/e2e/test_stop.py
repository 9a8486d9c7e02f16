"""How ``llamasup run`` ends: in order, in time, and with nothing left."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import Llamasup, await_removed, llamasup, seconds_until_gone
from tests.kit.patience import PATIENCE_S, eventually


def assert_nothing_left(children: list[psutil.Process], home: Path) -> None:
    gone, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []
    assert len(gone) == len(children)
    assert list((home / "run" / "llamasup").glob("*")) == []


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_idle_server_stops_at_a_signal(
    name: signal.Signals, tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        running.wait_for("ready")
        children = running.children()
        assert len(children) == 1
        assert running.stop(name) == 0
        states = [event["state"] for event in _all(running) if event["event"] == "state"]
        assert states[-3:] == ["draining", "stopping", "stopped"]
        assert running.events[-1] == {"event": "stopped", "protocol": 1}
        assert_nothing_left(children, own_folders)


def _all(running: Llamasup) -> list[dict[str, object]]:
    running.wait_for("stopped")
    return [dict(event) for event in running.events]


def test_ready_file_exists_while_requests_are_served(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    with llamasup(tiny_model, "--runtime", fake_server(), "--ready-file", str(ready_file)) as running:
        event = running.wait_for("ready")
        assert json.loads(ready_file.read_text()) == event
        assert event["pid"] == running.pid
        assert event["port"] > 0
        assert httpx.get(f"{event['url']}/health").json() == {"status": "ok"}
        assert running.stop() == 0
    assert not ready_file.exists()


def stream(url: str, pieces: list[bytes], outcome: list[object]) -> threading.Thread:
    """A client that reads a slow stream to its end."""

    def read() -> None:
        body = {"prompt": "Once", "n_predict": 20, "stream": True}
        try:
            with httpx.stream("POST", f"{url}/completion", json=body, timeout=60) as response:
                pieces.extend(response.iter_raw())
            outcome.append("complete")
        except httpx.HTTPError as error:
            outcome.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_stream_in_flight_finishes_during_the_drain(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path, tmp_path: Path
) -> None:
    pieces: list[bytes] = []
    outcome: list[object] = []
    server = fake_server("stall_after=1", f"until={tmp_path / 'go'}")
    with llamasup(tiny_model, "--runtime", server) as running:
        reader = stream(running.url, pieces, outcome)
        eventually(lambda: pieces, "no first piece")
        children = running.children()
        running.send_signal(signal.SIGTERM)
        running.wait_for("state", state="draining")
        late = httpx.post(f"{running.url}/completion", json={"prompt": "late"})
        assert late.status_code == 503
        assert httpx.get(f"{running.url}/readyz").status_code == 503
        (tmp_path / "go").touch()
        reader.join(PATIENCE_S)
        assert outcome == ["complete"]
        assert b"".join(pieces).rstrip().endswith(b"[DONE]") or b'"stop":true' in b"".join(pieces)
        assert running.end() == 0
        assert_nothing_left(children, own_folders)


def test_drain_timeout_ends_streams_with_an_error_event(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    pieces: list[bytes] = []
    outcome: list[object] = []
    with llamasup(tiny_model, "--runtime", fake_server("stall_after=1"), "--drain-timeout", "0.2") as running:
        reader = stream(running.url, pieces, outcome)
        eventually(lambda: pieces, "no first piece")
        children = running.children()
        assert running.stop() == 0
        reader.join(PATIENCE_S)
        assert b'"error"' in b"".join(pieces)
        assert b"[DONE]" not in b"".join(pieces)
        assert_nothing_left(children, own_folders)


def test_second_ctrl_c_does_not_wait(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    pieces: list[bytes] = []
    with llamasup(tiny_model, "--runtime", fake_server("stall_after=1")) as running:
        stream(running.url, pieces, [])
        eventually(lambda: pieces, "no first piece")
        children = running.children()
        running.send_signal(signal.SIGINT)
        running.wait_for("state", state="draining")
        assert running.stop(signal.SIGINT) == 0
        assert "stopping now" in running.stderr_text
        assert_nothing_left(children, own_folders)


def test_child_that_ignores_sigterm_is_killed(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    with llamasup(
        tiny_model, "--runtime", fake_server("ignore_sigterm=1"), "--stop-timeout", "0.3"
    ) as running:
        running.wait_for("ready")
        children = running.children()
        assert running.stop() == 0
        assert_nothing_left(children, own_folders)


def test_stop_during_the_load_does_not_wait_for_the_load(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("load_s=60")) as running:
        running.wait_for("state", state="loading")
        children = running.children()
        assert running.stop() == 0
        assert_nothing_left(children, own_folders)


def test_no_child_survives_a_sigkill_of_llamasup(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    """S14; test_nothing_left.py has more of it."""
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        running.wait_for("ready")
        children = running.children()
        (folder,) = (own_folders / "run" / "llamasup").iterdir()
        running.send_signal(signal.SIGKILL)
        running.end()
        seconds_until_gone(children)
        await_removed(folder)
