"""The access log of a whole llamasup: its contents, secrets that it never contains, and a full disk."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, llamasup, run_to_end, wrapped

FakeServer = Callable[..., str]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until_lines(path: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + PATIENCE_S
    while len(lines := lines_of(path) if path.exists() else []) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)
    return lines


def raw(url: str, request: bytes) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), PATIENCE_S) as sock:
        sock.sendall(request)
        answer = b""
        while more := sock.recv(65_536):
            answer += more
        return answer


def test_access_log_has_a_line_for_every_request_after_the_stop(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    with llamasup(tiny_model, "--runtime", fake_server(), "--access-log", str(path)) as running:
        with httpx.Client(base_url=running.url) as client:
            headers = {"X-Request-Id": "mine-1", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
            body = {"prompt": "a", "n_predict": 4}
            answer = client.post("/completion", json=body, headers=headers)
            assert answer.headers["x-request-id"] == "mine-1"
            assert client.get("/livez").status_code == 200
            assert client.get("/tools").status_code == 403
        assert running.stop() == 0
    completion, livez, tools = lines_of(path)
    assert (completion["request_id"], completion["trace_id"], completion["client"]) == (
        *("mine-1", TRACE),
        "127.0.0.1",
    )
    assert (completion["status"], completion["outcome"], completion["model"]) == (200, "ok", "tiny")
    assert completion["tokens_completion"] == 4
    assert completion["bytes_in"] > 0 < completion["bytes_out"]
    assert 0 <= completion["queue_s"] <= completion["first_byte_s"] <= completion["duration_s"]
    assert (livez["path"], livez["outcome"], livez["model"], livez["trace_id"]) == (
        *("/livez", "local"),
        *(None, None),
    )
    assert (tools["status"], tools["outcome"], tools["route"]) == (403, "refused", "other")


def test_access_log_contains_no_prompt_answer_key_or_query(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    path, keys = tmp_path / "access.log", tmp_path / "keys"
    keys.write_text("SECRET-key\n")
    keys.chmod(0o600)
    options = ("--runtime", fake_server(), "--access-log", str(path), "--api-key-file", str(keys))
    log_format = ("--log-format", "json", "--log-level", "debug", "--slow-request", "0.000001")
    with llamasup(tiny_model, *options, *log_format) as running:
        url = running.url
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer SECRET-key"}) as client:
            answer = client.post(
                "/completion?token=SECRET-q", json={"prompt": "SECRET-prompt", "n_predict": 4}
            )
            assert answer.status_code == 200
            made = answer.json()["content"]
            client.get("/no%0asuch/path?SECRET-q2")
            client.get("/props", headers={"X-Request-Id": "SECRET id", "X-Api-Key": "SECRET-other"})
            client.get("/props", headers={"User-Agent": "SECRET-agent", "Referer": "SECRET-referer"})
            client.get("/props", headers={"traceparent": "SECRET-trace", "tracestate": "v=SECRET-state"})
            client.get("/props", headers={"Cookie": "SECRET-cookie", "Origin": "http://SECRET-origin"})
        raw(url, b"GET /?SECRET-abs HTTP/1.1\r\nHost: SECRET-host\r\nConnection: close\r\n\r\n")
        raw(url, b"GET http://u:SECRET-pw@localhost/props?SECRET HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw(url, b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: SECRET\r\n\r\n")
        raw(url, b"SECRET-method /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw(
            url,
            b"GET /props HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer SECRET-wrong\r\n"
            b"Connection: close\r\n\r\n",
        )
        assert running.stop() == 0
    log = path.read_text()
    assert len(log.splitlines()) == 11, log
    for text in (log, running.stderr_text):
        assert "SECRET" not in text
        assert made not in text
    assert "/no%0asuch/path" in log
    assert {line["client"] for line in lines_of(path)} == {"key:key-1", "127.0.0.1"}


def test_requests_of_a_wrapped_command_are_logged_without_keys(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    words = (fake_server(), "-m", str(tiny_model), "--port", "0", "--api-key", "SECRET-key")
    with wrapped(*words, options=("--access-log", str(path))) as running:
        url = f"{running.url}/completion"
        for key, status in (("SECRET-key", 200), ("SECRET-wrong", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(url, json={"prompt": "a", "n_predict": 1}, headers=headers)
            assert answer.status_code == status
        assert running.stop() == 0
    assert [(line["status"], line["outcome"]) for line in lines_of(path)] == [(200, "ok"), (401, "ok")]
    assert "SECRET" not in path.read_text()


def test_access_log_on_standard_error_writes_whole_lines(tiny_model: Path, fake_server: FakeServer) -> None:
    with llamasup(tiny_model, "--runtime", fake_server(), "--access-log", "-") as running:
        with httpx.Client(base_url=running.url) as client:
            for _ in range(20):
                client.post("/completion", json={"prompt": "a", "n_predict": 1})
        assert running.stop() == 0
    lines = [json.loads(line) for line in running.stderr if line.startswith("{")]
    assert [line["path"] for line in lines] == ["/completion"] * 20


def test_log_moved_by_logrotate_is_reopened(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    path, moved = tmp_path / "access.log", tmp_path / "access.log-yesterday"
    with llamasup(tiny_model, "--runtime", fake_server(), "--access-log", str(path)) as running:
        with httpx.Client(base_url=running.url) as client:
            client.get("/livez")
            until_lines(path, 1)
            path.rename(moved)
            client.get("/readyz")
            until_lines(path, 1)
        assert running.stop() == 0
    assert [line["path"] for line in lines_of(moved) + lines_of(path)] == ["/livez", "/readyz"]


def test_full_disk_loses_log_lines_but_no_request(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    full = ("prlimit", "--fsize=4000:4000")
    with llamasup(tiny_model, "--runtime", fake_server(), "--access-log", str(path), prefix=full) as running:
        with httpx.Client(base_url=running.url) as client:
            for _ in range(30):
                assert client.get("/livez").status_code == 200
            deadline = time.monotonic() + PATIENCE_S
            while (dropped := dropped_lines(client)) == 0:
                assert time.monotonic() < deadline
        assert running.stop() == 0
    written = lines_of(path)
    assert len(written) + dropped >= 30
    assert running.stderr_text.count("the access log is no longer written") == 1
    assert str(path) in running.stderr_text


def dropped_lines(client: httpx.Client) -> int:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("llamasup_access_log_dropped_total "):
            return int(float(line.split()[1]))
    raise AssertionError("no such metric")


@pytest.mark.parametrize(
    ("where", "says"),
    [("none/access.log", "No such file or directory"), (".", "Is a directory"), ("link", "symlink")],
)
def test_invalid_log_path_is_refused_before_the_start(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path, where: str, says: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    options = ("--runtime", fake_server(), "--port", "0", "--access-log", str(tmp_path / where))
    done = run_to_end("run", str(tiny_model), *options)
    assert done.returncode == 78, done.stderr
    assert done.stderr.startswith("llamasup: The access log cannot be written")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_slow_request_is_logged_with_its_phases(tiny_model: Path, fake_server: FakeServer) -> None:
    with llamasup(tiny_model, "--runtime", fake_server(), "--slow-request", "0.000001") as running:
        with httpx.Client(base_url=running.url) as client:
            for _ in range(30):
                client.post(
                    "/completion", json={"prompt": "a", "n_predict": 1}, headers={"X-Request-Id": "r"}
                )
            client.get("/metrics")
        assert running.stop() == 0
    slow = [line for line in running.stderr if line.startswith("slow: ")]
    assert 10 <= len(slow) < 20  # the rest is only counted
    assert all("POST /completion" in line and "in llama-server" in line and "[r]" in line for line in slow)


def test_log_line_and_terminal_say_why_a_request_was_refused(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    path, keys = tmp_path / "access.log", tmp_path / "keys"
    keys.write_text("sk-a name=alice rpm=1\n")
    keys.chmod(0o600)
    options = ("--api-key-file", str(keys), "--access-log", str(path))
    with llamasup(tiny_model, "--runtime", fake_server(), *options) as running:
        running.wait_for("ready")
        with httpx.Client(base_url=running.url, headers={"Authorization": "Bearer sk-a"}) as client:
            assert client.post("/completion", json={"prompt": "a"}).status_code == 200
            assert client.post("/completion", json={"prompt": "a"}).status_code == 429
            assert client.get("/slots", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert running.stop() == 0
        said = running.stderr_text
    answered, limited, stranger = lines_of(path)
    assert (answered["client"], answered["cause"]) == ("key:alice", None)
    assert (limited["client"], limited["cause"]) == ("key:alice", "key_requests")
    assert (stranger["client"], stranger["cause"]) == ("127.0.0.1", "api_key")
    assert "alice  429" in said
    assert "(refused: key requests)" in said
    assert "(refused: api key)" in said
