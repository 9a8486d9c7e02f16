"""Requests with several jobs before a real llama-server: one request cannot hold all slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from llamasup.core.http.requested_model import read_body
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit.bodies import bodies

pytestmark = pytest.mark.one_runtime

KEYS = "limited name=limited concurrent=1\nfree name=free\nother name=other\n"


def completion(running: Llamasup, key: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}/completion", headers=headers, json=body, timeout=PATIENCE_S)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.mark.check("X8", "400 too_many_jobs")
def test_key_with_one_concurrent_request_cannot_hold_every_slot(
    runtime: str, tiny_model: Path, key_file: Path
) -> None:
    arguments = (
        "--runtime",
        runtime,
        "--api-key-file",
        str(key_file),
        "--ctx-size",
        "512",
        "--parallel",
        "2",
    )
    with llamasup(tiny_model, *arguments) as running:
        small = completion(running, "limited", prompt=["Once"] * 3000, n_predict=400, ignore_eos=True)
        large = completion(running, "limited", prompt=["Once" * 40] * 3000, n_predict=400, ignore_eos=True)
        other = completion(running, "other", prompt="Once", n_predict=1)
        ids = completion(running, "limited", prompt=[1, 2, 3], n_predict=1)
        assert running.stop() == 0
    for refused in (small, large):
        assert refused.status_code == 400
        assert refused.json()["error"]["cause"] == "too_many_jobs"
        assert "3000 jobs" in refused.json()["error"]["message"]
    assert (other.status_code, ids.status_code) == (200, 200)


def test_counted_jobs_equal_the_answers_of_the_server(runtime: str, tiny_model: Path) -> None:
    """``prompt`` and ``n`` of every shape: as many answers as jobs."""
    with llamasup(tiny_model, "--runtime", runtime, "--ctx-size", "512", "--parallel", "2") as running:
        shapes: list[tuple[Any, int]] = [
            ("Once", 1),
            (["Once", "Twice"], 2),
            ([[1, 2], [3], "Once"], 3),
            ([1, 2, 3], 1),
            (["Once", 1, "Twice"], 1),
            ([{"prompt_string": "Once"}, "Twice"], 2),
        ]
        for prompt, jobs in shapes:
            for n in (1, 2):
                answer = completion(running, "none", prompt=prompt, n=n, n_predict=1)
                assert answer.status_code == 200, answer.text
                answers = answer.json()
                assert (len(answers) if isinstance(answers, list) else 1) == jobs * n, prompt
        assert running.stop() == 0


def test_random_bodies_start_no_more_jobs_than_are_counted(runtime: str, tiny_model: Path) -> None:
    arguments = ("--runtime", runtime, "--ctx-size", "256", "--parallel", "4", "--wait-timeout", "0")
    started: list[int] = []
    with (
        llamasup(tiny_model, *arguments) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http,
    ):

        @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        # Without ``n``: an empty array of ids with ``n`` above 1 is never answered (b11434).
        @given(bodies(["prompt"]))
        def ask(body: bytes) -> None:
            body = body[:-1] + (b', "n_predict": 1}' if len(body) > 2 else b"}")
            answer = http.post("/completion", content=body)
            if answer.status_code == 200:
                answers = answer.json()
                started.append(len(answers) if isinstance(answers, list) else 1)
                assert started[-1] <= read_body(body, b"", "/completion")[1], body

        ask()
        assert running.stop() == 0
    print(f"{len(started)} were answered, of up to {max(started)} jobs")
