"""API keys from their creation to a refused request, while the service keeps running."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup, run_to_end

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def asked(http: httpx.Client, key: str | None, *, header: str = "Authorization") -> httpx.Response:
    value = f"Bearer {key}" if header == "Authorization" else str(key)
    return http.post("/v1/chat/completions", json=BODY, headers={} if key is None else {header: value})


def await_status(http: httpx.Client, key: str, status: int) -> httpx.Response:
    """Ask on one connection until the answer is another one; the change is noticed within a second."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := asked(http, key)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)
    return answer


def made(*arguments: str) -> str:
    done = run_to_end("key", "new", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def client(running: Llamasup) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=1))


def test_key_is_created_used_and_revoked_during_the_service(
    tiny_model: Path, fake_server: Callable[..., str], own_folders: Path
) -> None:
    plain, hashed = made("alice"), made("bob", "--hashed", "--rpm", "1")
    path = own_folders / "config" / "llamasup" / "keys"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    arguments = ("--runtime", fake_server(), "--api-key-file", str(path))
    with llamasup(tiny_model, *arguments) as running, client(running) as http:
        assert asked(http, None).status_code == 401
        assert asked(http, plain).status_code == 200
        assert asked(http, plain, header="x-api-key").status_code == 200
        assert asked(http, hashed).status_code == 200
        limited = asked(http, hashed)
        assert limited.status_code == 429
        assert 1 <= int(limited.headers["retry-after"]) <= 60
        assert limited.json()["error"]["cause"] == "key_requests"

        assert run_to_end("key", "revoke", "alice").returncode == 0
        refused = await_status(http, plain, 401)
        assert refused.json()["error"]["cause"] == "api_key"
        await_status(http, made("carol"), 200)
        assert running.stop() == 0
        for secret in (plain, hashed):
            assert secret not in running.stderr_text
            assert secret not in json.dumps(running.events)


def test_key_file_without_keys_admits_no_client_and_is_reported(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    path.chmod(0o600)
    arguments = ("--runtime", fake_server(), "--api-key-file", str(path))
    with llamasup(tiny_model, *arguments) as running, client(running) as http:
        assert asked(http, "one").status_code == 200
        assert run_to_end("key", "revoke", "key-1", "--file", str(path)).returncode == 0
        await_status(http, "one", 401)
        assert asked(http, None).status_code == 401
        path.write_text("two\n")
        await_status(http, "two", 200)
        assert asked(http, "one").status_code == 401
        assert running.stop() == 0
        assert running.stderr_text.count("has no keys now") == 1


def test_invalid_key_file_is_reported_before_the_start(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("# team\nsecret-of-alice nmae=alice\n")
    done = run_to_end("run", str(tiny_model), "--runtime", fake_server(), "--api-key-file", str(path))
    assert done.returncode == 78
    assert f"{str(path)!r}, line 2: unknown attribute nmae= (did you mean name?)." in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_key_file_readable_by_others_is_a_warning(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    path.chmod(0o644)
    arguments = ("--runtime", fake_server(), "--api-key-file", str(path))
    with llamasup(tiny_model, *arguments) as running, client(running) as http:
        assert asked(http, "one").status_code == 200
        assert running.stop() == 0
        assert running.stderr_text.count("Other users can read the API key file") == 1


def test_many_commands_at_once_lose_no_key(own_folders: Path) -> None:
    names = [f"n{number}" for number in range(6)]
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "llamasup", "key", "new", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name in names
    ]
    for command in commands:
        _, err = command.communicate(timeout=PATIENCE_S)
        assert command.returncode == 0, err
    listed = json.loads(run_to_end("key", "list", "--json").stdout)
    assert sorted(key["name"] for key in listed["keys"]) == names


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("new", "a", "--rpm", "0"), "0 is less than 1"),
        (("new", "a", "--rpm", "many"), "'many' is not a whole number"),
        (("new", "a", "--rights", "admin"), "'admin' is not inference"),
        (("new", "a", "--priority", "low"), "'low' is not normal or high"),
        (("revoke", "a", "--file", "~nobody-of-this-name/keys"), "there is no user"),
    ],
)
def test_invalid_options_are_usage_errors(arguments: tuple[str, ...], says: str) -> None:
    done = run_to_end("key", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
