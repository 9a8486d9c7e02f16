"""Requests that Home Assistant and VS Code Copilot send to Ollama, and the fields that they read of the
answers. The files in ``tests/fixtures/ollama_clients`` name the sources.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.conftest import PATIENCE_S
from tests.clients.models import tool_caller
from tests.e2e.driver import started
from tests.kit.models import tiny_decoder
from tests.kit.paths import ROOT
from tests.kit.ports import free_port
from tests.real.remains import folders_of

RECORDED = {
    path.stem: json.loads(path.read_text())["calls"]
    for path in sorted((ROOT / "tests" / "fixtures" / "ollama_clients").glob("*.json"))
}
CALLS = [(client, number) for client, calls in RECORDED.items() for number in range(len(calls))]
KINDS: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "array": list,
    "object": dict,
}


@pytest.fixture(scope="module")
def url(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ollama's API without keys, which these clients do not send."""
    home = tmp_path_factory.mktemp("r")  # short: sockets lie below it
    address = f"127.0.0.1:{free_port()}"
    config: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "ollama": {"listen": address},
        "runtime": runtime,
        # Home Assistant asks for this context, unless the user sets another one.
        "defaults": {"ctx_size": 8192, "parallel": 1},
        "models": {},
        # Ollama's API has no tool_choice, without which this model calls nothing.
        "virtual_models": {"must-call": {"model": "caller", "set": {"tool_choice": "required"}}},
    }
    for name, content in {"caller": tool_caller(), "tiny": tiny_decoder()}.items():
        path = home / f"{name}.gguf"
        path.write_bytes(content)
        config["models"][name] = {"path": str(path)}
    (home / "config.yaml").write_text(json.dumps(config))  # which is YAML
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    env = {**os.environ, **folders_of(home), **cache}
    with started("serve", "--config", str(home / "config.yaml"), env=env) as running:
        running.wait_for("ready")
        yield f"http://{address}"
        assert running.stop() == 0


def values(found: Any, path: str) -> list[Any]:
    """The values at a path such as ``models.*.name``; a backslash is before a dot within a name."""
    at = [found]
    for name in re.split(r"(?<!\\)\.", path):
        if name == "*":
            at = [item for each in at for item in each]
        else:
            key = name.replace("\\.", ".")
            at = [each[key] for each in at if key in each]
    return at


def objects(answer: httpx.Response) -> list[Any]:
    """The JSON of the answer: its events, its lines, or all of it."""
    kind = answer.headers["content-type"]
    if kind.startswith("text/event-stream"):
        events = answer.text.replace("\r\n", "\n").split("\n\n")
        return [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    if kind.startswith("application/x-ndjson"):
        return [json.loads(line) for line in answer.text.splitlines()]
    return [answer.json()]


@pytest.mark.parametrize(("client", "number"), CALLS)
def test_recorded_call_gets_what_its_client_reads(url: str, client: str, number: int) -> None:
    call = RECORDED[client][number]
    answer = httpx.request(
        call["method"],
        url + call["path"],
        headers=call["headers"],
        content=json.dumps(call["body"]) if "body" in call else None,
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200, answer.text
    found = objects(answer)
    for each in found:
        for path, kind in call["reads"].items():
            read = values(each, path)
            assert read, f"{path} is missing in {each}"
            assert all(isinstance(value, KINDS[kind]) for value in read), (path, read)
    for path, kind in call.get("some", {}).items():
        read = [value for each in found for value in values(each, path)]
        assert read, path
        assert all(isinstance(value, KINDS[kind]) for value in read)
    if "content" in call:
        assert isinstance(json.loads("".join(each["message"]["content"] for each in found)), dict)
    if call["path"] == "/api/chat":
        assert [each["done"] for each in found] == [False] * (len(found) - 1) + [True]
