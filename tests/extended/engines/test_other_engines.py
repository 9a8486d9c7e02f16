"""Servers of other people, from PyPI and npm, as models with a command."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from llamasup.service.serve import ServeOptions
from tests.e2e.driver import seconds_until_gone
from tests.e2e.service import hosted
from tests.e2e.test_commands import QUICK, config_of
from tests.kit.paths import ROOT

PATIENT = replace(QUICK, health_timeout_s=2.0)
FOLDER = ROOT / ".build" / "engines"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ENGINES: dict[str, dict[str, Any]] = {
    "stubllm": {  # FastAPI and uvicorn, 70 MB
        "install": [
            [sys.executable, "-m", "venv", "python"],
            ["python/bin/pip", "install", "-q", "stubllm==0.1.5"],
        ],
        "command": ["python/bin/stubllm", "serve", "--port", "{port}"],
    },
    "mock-llm": {  # Express on Node, 43 MB; it reads its port from its environment
        "install": [
            ["npm", "install", "--prefix", "node", "--silent", "--ignore-scripts", "@dwmkerr/mock-llm@0.1.29"]
        ],
        "command": ["env", "PORT={port}", "node/node_modules/.bin/mock-llm"],
    },
}


@pytest.fixture(params=ENGINES)
def entry(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The entry of the config of an installed engine."""
    engine = ENGINES[request.param]
    stamp = FOLDER / f"{request.param}.installed"
    if not stamp.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        for words in engine["install"]:
            if shutil.which(words[0], path=f"{os.environ['PATH']}") is None and "/" not in words[0]:
                pytest.skip(f"{words[0]} is missing")
            done = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot be installed: {done.stderr[-200:]}")
        stamp.touch()
    command = [str(FOLDER / word) if "/" in word and "=" not in word else word for word in engine["command"]]
    routes = ["/v1/chat/completions", "/v1/embeddings"]
    return {"command": command, "health": "/health", "routes": routes, "memory": {"ram": "200MiB"}}


def test_engine_is_served_and_survives_kills_and_a_hang(entry: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, engine=entry)

    async def test() -> None:
        seen: list[psutil.Process] = []
        async with hosted(partial(ServeOptions.of, lambda: config, liveness=PATIENT)) as server:
            for generation, number in enumerate((signal.SIGKILL, signal.SIGSTOP, None), 1):
                asked = [server.client.post("/v1/chat/completions", json={"model": "engine", **CHAT})]
                asked += [server.client.post("/v1/chat/completions", json=CHAT) for _ in range(7)]
                answers = await asyncio.gather(*asked)
                assert {answer.status_code for answer in answers} == {200}
                assert answers[0].json()["choices"][0]["message"]["content"]
                stream = await server.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
                assert stream.headers["content-type"].startswith("text/event-stream")
                assert stream.text.startswith("data: {")
                process = psutil.Process(server.runner_of("engine").pid or 0)
                seen += [process, *process.children(recursive=True)]
                if number is not None:
                    os.kill(process.pid, number)
                    exited = await server.exit_of(generation)
                    assert exited.diagnosis.cause == ("killed", "unresponsive")[generation - 1]
        await asyncio.to_thread(seconds_until_gone, seen)

    asyncio.run(test())
