"""Requests that agents of others sent get the tool calls of a script, from a real llama-server.

``scripts/test_clients --record`` writes them into ``tests/fixtures/agents``, so that the gate needs no npm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.driver import started
from tests.kit.agent_requests import body_of, model_of, recorded
from tests.kit.patience import PATIENCE_S
from tests.real.remains import folders_of

RECORDED = recorded()
REQUESTS = [(name, number) for name, each in RECORDED.items() for number in range(len(each["requests"]))]
STRICT = "-strict"
WITH_LATER = ("claude-code", "codex")
"""The agents that send a system or developer message after others."""


@pytest.fixture(scope="module")
def url(llama_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("g")  # short: sockets lie below it
    config: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "runtime": llama_server,
        "defaults": {"ctx_size": 32_768, "parallel": 1},
        "models": {},
    }
    for name, fixture in RECORDED.items():
        for kind in ("", STRICT) if name in WITH_LATER else ("",):
            path = home / f"{name}{kind}.gguf"
            path.write_bytes(model_of(fixture, is_strict=bool(kind)))
            config["models"][name + kind] = {"path": str(path)}
    (home / "config.yaml").write_text(json.dumps(config))  # which is YAML
    with started(
        "serve", "--config", str(home / "config.yaml"), env={**os.environ, **folders_of(home)}
    ) as running:
        running.wait_for("ready")
        yield running.url
        assert running.stop() == 0


@pytest.mark.one_runtime
@pytest.mark.parametrize(("client", "number"), REQUESTS)
def test_recorded_request_gets_the_next_call_of_the_script(url: str, client: str, number: int) -> None:
    assert "x-llamasup-moved-system" not in replayed(url, client, number)


@pytest.mark.one_runtime
@pytest.mark.parametrize(("client", "number"), [each for each in REQUESTS if each[0] in WITH_LATER])
def test_template_that_refuses_a_later_system_message_makes_no_difference(
    url: str, client: str, number: int
) -> None:
    headers = replayed(url, client, number, STRICT)
    assert ("x-llamasup-moved-system" in headers) == (client == "claude-code")  # Codex begins with all


def replayed(url: str, client: str, number: int, kind: str = "") -> httpx.Headers:
    """Send a recorded request again, and check its answer. Returns the headers of the answer."""
    fixture = RECORDED[client]
    request = fixture["requests"][number]
    body = {**body_of(fixture, request), "model": client + kind}
    answer = httpx.post(
        url + request["path"], headers=request["headers"], content=json.dumps(body), timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    done = results_in(body)
    calls, text = {"messages": messages, "responses": responses}.get(api_of(request), chat)(events)
    if "tools" in body and done < len(fixture["calls"]):
        assert calls == [fixture["calls"][done]]
    else:
        assert (calls, text) == ([], fixture["text"])
    return answer.headers


def api_of(request: Any) -> str:
    return str(request["path"].partition("?")[0].rpartition("/")[2])


def results_in(body: Any) -> int:
    """Count the results of tools in the conversation."""
    items = [item for item in body.get("messages", body.get("input")) if isinstance(item, dict)]
    blocks = [block for item in items if isinstance(item.get("content"), list) for block in item["content"]]
    return sum(
        item.get("role") == "tool"
        or item.get("type") in ("function_call_output", "custom_tool_call_output", "tool_result")
        for item in [*items, *blocks]
    )


Answer = tuple[list[dict[str, Any]], str]


def chat(events: list[Any]) -> Answer:
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls") or ()]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == ("tool_calls" if pieces else "stop")
    arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
    names = [piece["function"]["name"] for piece in pieces if "name" in piece["function"]]
    return [{"name": name, "arguments": json.loads(arguments)} for name in names], text


def messages(events: list[Any]) -> Answer:
    assert events[-1]["type"] == "message_stop"
    names = [
        event["content_block"]["name"]
        for event in events
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use"
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    text = "".join(delta.get("text", "") for delta in deltas)
    return [{"name": name, "arguments": json.loads(arguments)} for name in names], text


def responses(events: list[Any]) -> Answer:
    assert events[-1]["type"] == "response.completed"
    items = events[-1]["response"]["output"]
    calls = [
        {"name": item["name"], "arguments": json.loads(item["arguments"])}
        if item["type"] == "function_call"
        else {"name": item["name"], "arguments": {"input": item["input"]}}
        for item in items
        if item["type"] in ("function_call", "custom_tool_call")
    ]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    return calls, "".join(texts)
