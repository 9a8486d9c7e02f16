"""How ``llamasup run`` starts: the warm-up, the messages meanwhile, and the diagnosis of failures."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import llamasup, run_to_end


def test_states_are_reported_in_order_and_ready_is_last(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    server = fake_server("load_s=600", f"until={tmp_path / 'go'}")
    with llamasup(tiny_model, "--runtime", server) as running:
        running.wait_for("state", state="loading")
        (tmp_path / "go").touch()
        ready = running.wait_for("ready")
        assert running.events == [
            {"event": "state", "protocol": 1, "model": "tiny", "state": state, "generation": 1}
            for state in ("starting", "loading", "warming", "ready")
        ] + [ready]
        assert ready["url"] == f"http://127.0.0.1:{ready['port']}"
        assert running.stop() == 0


def test_clients_get_503_during_the_load_without_a_queue(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("load_s=60"), "--wait-timeout", "0") as running:
        running.wait_for("state", state="loading")
        (port,) = [
            connection.laddr.port
            for connection in psutil.Process(running.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        url = f"http://127.0.0.1:{port}"
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": []})
        health = httpx.get(f"{url}/health")
        for response in (answer, health):
            assert response.status_code == 503
            error = response.json()["error"]
            assert error["message"] == "Loading model"
            assert error["type"] == "unavailable_error"
            assert error["code"] == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{url}/livez").status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 503
        assert running.stop() == 0


def test_server_without_a_token_is_never_announced_as_ready(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("status=500")) as running:
        event = running.wait_for("exit")
        assert event["cause"] == "warm_up_failed"
        assert "500" in event["message"]
        assert running.stop() == 0
        assert not [one_event for one_event in running.events if one_event["event"] == "ready"]


def test_server_without_warm_up_is_announced_when_it_is_healthy(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("status=500"), "--no-warmup") as running:
        running.wait_for("ready")
        assert not [event for event in running.events if event.get("state") == "warming"]
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("out_of_memory=host", 71, "out_of_memory"),
        ("out_of_memory=device", 71, "out_of_memory"),
    ],
)
def test_exit_during_the_start_is_explained(
    fault: str, code: int, cause: str, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    done = run_to_end(
        *("run", str(tiny_model), "--runtime", fake_server(fault), "--port", "0", "--events", "jsonl")
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    exits = [event for event in events if event["event"] == "exit"]

    assert done.returncode == code, done.stderr
    assert all(cause in exit_event["cause"] for exit_event in exits)
    # Each but the last is answered by a smaller plan (tests/e2e/test_ladder.py).
    assert [exit_event["restart_in_s"] is None for exit_event in exits] == [False] * (len(exits) - 1) + [True]
    assert "llama-server said:" in done.stderr
    assert re.search(r"\| .*allocat", done.stderr)
    assert "→" in done.stderr
    assert "Traceback" not in done.stderr
    assert events[-1]["event"] == "stopped"


def test_repeated_crashes_end_with_75(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    """Six crashes: 0.5, 1, 2, 4 and 8 s between them. The longest test here, and about real time."""
    no_ladder = ("--profile", "plain")
    with llamasup(tiny_model, "--runtime", fake_server("signal=load:SIGSEGV"), *no_ladder) as running:
        assert running.end() == 75
        running_events = [dict(event) for event in _drain(running)]
    exits = [event for event in running_events if event["event"] == "exit"]
    assert len(exits) == 6
    assert all(exit_event["signal"] == "SIGSEGV" for exit_event in exits)
    waits = [exit_event["restart_in_s"] for exit_event in exits]
    assert waits[-1] is None
    for wait, middle in zip(waits[:-1], (0.5, 1, 2, 4, 8), strict=True):
        assert wait == pytest.approx(middle, rel=0.2)
    assert "Gave up after 6 crashes" in running.stderr_text


def _drain(running: object) -> list[dict[str, object]]:
    running.wait_for("stopped")  # type: ignore[attr-defined]
    return running.events  # type: ignore[attr-defined,no-any-return]


def test_next_generation_serves_after_a_kill(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        url = running.url
        (child,) = running.children()
        child.send_signal(signal.SIGKILL)
        event = running.wait_for("exit")
        assert (event["signal"], event["cause"], event["restart_in_s"]) == ("SIGKILL", "killed", 0.0)
        running.wait_for("state", state="ready", generation=2)
        assert httpx.post(f"{url}/completion", json={"prompt": "x"}).status_code == 200
        assert 'llamasup_restarts_total{cause="killed",model="tiny"} 1.0' in httpx.get(f"{url}/metrics").text
        assert running.stop() == 0
        assert "is ready again" in running.stderr_text


def test_stream_cut_by_a_crash_never_looks_complete(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("token_s=0.05", "tokens=10000")) as running:
        url = running.url
        (child,) = running.children()
        body = {"prompt": "x", "stream": True}
        received = b""
        with (
            pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response,
        ):
            for piece in response.iter_raw():
                if not received:
                    child.send_signal(signal.SIGKILL)
                received += piece
        assert b'"error"' in received
        assert b"[DONE]" not in received
        running.wait_for("state", state="ready", generation=2)
        assert running.stop() == 0


def test_request_is_logged_as_one_line_without_the_prompt(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        body = {"prompt": "my secret", "n_predict": 4}
        httpx.post(f"{running.url}/completion?also=secret", json=body)
        assert running.stop() == 0
        (line,) = [line for line in running.stderr_text.splitlines() if line.startswith("POST")]
        assert re.fullmatch(r"POST  /completion  200  \d+\+4 tokens(  [\d.]+ tok/s)?  [\d.]+ m?s", line)
        assert "secret" not in running.stderr_text


def test_json_log_has_one_object_per_line(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    with llamasup(tiny_model, "--runtime", fake_server(), "--log-format", "json") as running:
        httpx.post(f"{running.url}/completion", json={"prompt": "x", "n_predict": 4})
        assert running.stop() == 0
        records = [json.loads(line) for line in running.stderr_text.splitlines()]
    by_event = {record["event"]: record for record in records}
    assert {"ready", "request", "stop", "stopped"} <= set(by_event)
    assert by_event["request"]["status"] == 200
    assert by_event["request"]["tokens_completion"] == 4
    assert by_event["request"]["generation"] == 1
    assert all(set(record) >= {"time", "level", "event", "message"} for record in records)


def test_api_key_is_accepted_and_appears_in_no_log_or_command_line(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("s3cret-key\n")
    with llamasup(tiny_model, "--runtime", fake_server(), "--api-key-file", str(keys)) as running:
        url = running.url
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/props").status_code == 401
        assert httpx.get(f"{url}/props", headers={"x-api-key": "wrong"}).status_code == 401
        for headers in ({"x-api-key": "s3cret-key"}, {"authorization": "Bearer s3cret-key"}):
            assert httpx.get(f"{url}/props", headers=headers).status_code == 200
        (child,) = running.children()
        assert not [word for word in child.cmdline() if "s3cret" in word]
        assert running.stop() == 0
        assert "s3cret" not in running.stderr_text


def test_environment_of_the_child_contains_nothing_of_llamasup(
    tiny_model: Path, fake_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws")
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        running.wait_for("ready")
        (child,) = running.children()
        environment = child.environ()
        assert not {"HF_TOKEN", "LLAMA_ARG_CTX_SIZE", "AWS_SECRET_ACCESS_KEY"} & set(environment)
        assert Path(child.cwd()).name.startswith(f"{running.pid}-")
        assert running.stop() == 0


def test_server_with_an_unknown_api_key_is_not_restarted_forever(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("status=401")) as running:
        failed = running.wait_for("exit")
        assert running.end() == 69
    assert (failed["cause"], failed["restart_in_s"]) == ("locked_out", None)
    assert "config.ini" in running.stderr_text
