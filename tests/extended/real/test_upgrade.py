"""Six builds of llama.cpp, five of them bad, while clients send requests: none of these fails."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, command, run_to_end, started
from tests.extended.real.bad_build import build

BODY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
PAUSE_S = 2.0  # between two requests of the client; the speed is compared in such pauses
LONGEST_PROOF_S = 5 * PATIENCE_S  # of 300 requests, if the machine is too busy to compare the speed sooner


class Client:
    """Sends one request after the other until ``stop``. ``answers``: status and text, counted."""

    def __init__(self, url: str) -> None:
        self.answers: Counter[tuple[int, str]] = Counter()
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not self.answers or not self._over.wait(PAUSE_S):  # at least one request
                answer = http.post(f"{self._url}/v1/completions", json=BODY)
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                self.answers[answer.status_code, text] += 1

    def stop(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)


@contextmanager
def serving(folder: Path, model: Path, runtime: str) -> Iterator[Llamasup]:
    with serving_with(folder, model, build(folder / "old-server", runtime)) as running:
        yield running


@contextmanager
def serving_with(folder: Path, model: Path, runtime: object) -> Iterator[Llamasup]:
    """A preloaded model that needs --keep. ``runtime``: the key of the config."""
    config = folder / "config.yaml"
    entry = {"path": str(model), "ctx_size": 512, "parallel": 2, "extra": ["--keep", "5"], "preload": True}
    keys = {"runtime": runtime, "models": {"tiny": entry}, "usage": {"enabled": False}}
    config.write_text(json.dumps(keys))
    with started("serve", "--config", str(config), "--port", "0") as running:
        running.wait_for("ready")
        yield running
        assert running.stop() == 0


def upgraded(running: Llamasup, new: str) -> subprocess.CompletedProcess[str]:
    arguments = command("upgrade", "--runtime", new, "--pid", str(running.pid))
    return subprocess.run(arguments, capture_output=True, text=True, timeout=LONGEST_PROOF_S, check=False)


@pytest.mark.timeout(LONGEST_PROOF_S + PATIENCE_S)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("slow", "of the speed of the running build; 90% are needed"),
        ("leak", "its memory has grown by"),
        ("crash", "of 100"),
        ("wrong", "its text is that of the running build for"),
        ("flag", "has no plan with it"),
        ("none", ""),
    ],
)
def test_only_the_good_build_serves_and_no_request_fails(
    tmp_path: Path, tiny_model: Path, runtime: str, fault: str, why: str
) -> None:
    new = build(tmp_path / "new-server", runtime, fault)
    with serving(tmp_path, tiny_model, runtime) as running:
        client = Client(running.url)
        try:
            ended = upgraded(running, new)
            shown = json.loads(run_to_end("upgrade", "--json", "--pid", str(running.pid)).stdout)
            sentence = run_to_end("why", "tiny", "--json", "--pid", str(running.pid)).stdout
        finally:
            client.stop()
        (answer,) = client.answers
        assert answer[0] == 200, client.answers
        if fault == "none":
            assert ended.returncode == 0, ended.stderr
            assert shown["state"] == "watching"
            assert shown["proof"]["requests"] >= 100
            assert "gets a new build of llama.cpp" in sentence
        else:
            assert ended.returncode == 69
            assert why in ended.stderr, ended.stderr
            assert shown["state"] == "refused"
            assert why in shown["reason"]
            assert fault == "flag" or "keeps its build of llama.cpp" in sentence


def test_dry_run_shows_the_plans_and_starts_nothing(tmp_path: Path, tiny_model: Path, runtime: str) -> None:
    new = build(tmp_path / "new-server", runtime)
    with serving(tmp_path, tiny_model, runtime) as running:
        before = {child.pid for child in running.children()}
        arguments = ("upgrade", "--runtime", new, "--dry-run", "--pid", str(running.pid))
        shown = json.loads(run_to_end(*arguments, "--json").stdout)
        assert [(model["id"], model["flags"], model["problem"]) for model in shown["models"]] == [
            ("tiny", [], None)
        ]
        assert "tiny: no change of its flags" in run_to_end(*arguments).stdout
        assert {child.pid for child in running.children()} == before


@pytest.mark.timeout(2 * LONGEST_PROOF_S + PATIENCE_S)
def test_watched_link_moves_the_models_to_the_build_that_proves_itself(
    tmp_path: Path, tiny_model: Path, runtime: str
) -> None:
    """The first build that the link points to lacks a flag, the second one is good."""
    link = tmp_path / "current"
    link.symlink_to(build(tmp_path / "old-server", runtime))
    builds = {fault: build(tmp_path / f"{fault}-server", runtime, fault) for fault in ("flag", "none")}
    with serving_with(tmp_path, tiny_model, {"path": str(link), "watch": True}) as running:
        client = Client(running.url)
        try:
            for fault, state, why in (("flag", "refused", "has no plan with it"), ("none", "watching", "")):
                new = tmp_path / "new-link"
                new.symlink_to(builds[fault])
                new.rename(link)
                shown = state_of_upgrade(running, builds[fault], until=state)
                assert shown["state"] == state, shown
                assert why in shown["reason"]
        finally:
            client.stop()
        (answer,) = client.answers
        assert answer[0] == 200, client.answers


def state_of_upgrade(running: Llamasup, build: str, until: str) -> dict[str, Any]:
    """What ``llamasup upgrade`` shows of this build at the end of its upgrade."""
    deadline_s = time.monotonic() + LONGEST_PROOF_S
    while True:  # no busy loop: the speed of the builds is compared meanwhile
        shown: dict[str, Any] = json.loads(run_to_end("upgrade", "--json", "--pid", str(running.pid)).stdout)
        is_of_build = shown["runtime"] is not None and shown["runtime"]["path"] == build
        if (is_of_build and shown["state"] in ("refused", until)) or time.monotonic() > deadline_s:
            return shown
        time.sleep(1.0)
