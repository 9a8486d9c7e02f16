"""The tools of agents with a real llama-server, whose template makes it write calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import Llamasup, llamasup
from tests.features.agent_tools.agents import APPLY_PATCH, FLAT, PATCH, WEATHER, call, read
from tests.kit.patience import PATIENCE_S
from tests.real.bare_server import bare_server

TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('Only one system message.') }}
{%- endif %}
{%- if message.tool_calls is defined %}
{%- for call in message.tool_calls %}<|im_start|>assistant
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}<|im_end|>
{% endfor %}
{%- else %}<|im_start|>{{ message.role }}
{%- if loop.first and tools %}{% for tool in tools %}
{{ tool | tojson }}{% endfor %}{% endif %}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Calls are JSON, as those of Llama 3.1. As that of Qwen3.5, it refuses a second system message."""

SYSTEM = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]}
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "The weather?"}]}


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def begun(name: str) -> dict[str, Any]:
    """The beginning of a call, which llama-server continues by its grammar."""
    part = {"type": "output_text", "text": f'{{"name": "{name}"'}
    return {"type": "message", "role": "assistant", "content": [part]}


def ask(running: Llamasup, *items: Any, stream: bool = False, **more: Any) -> httpx.Response:
    body = {
        "input": items,
        "tools": [WEATHER, APPLY_PATCH],
        "max_output_tokens": 60,
        "stream": stream,
        **more,
    }
    return httpx.post(f"{running.url}/v1/responses", json={"temperature": 0, **body}, timeout=PATIENCE_S)


@pytest.mark.one_runtime
def test_tools_of_agents_are_called(llama_server: str, tiny_model: Path, template: str) -> None:
    weather, patch = ({"type": "function", "name": name} for name in ("get_weather", "apply_patch"))
    with llamasup(tiny_model, "--runtime", llama_server, "--", "--chat-template-file", template) as running:
        running.wait_for("ready")
        whole = ask(running, USER, begun(FLAT), tool_choice=weather).json()
        (found,) = whole["output"]
        assert (found["type"], found["name"], found["namespace"]) == (
            "function_call",
            "get_weather",
            "mcp__weather",
        )
        events = read(ask(running, USER, begun("apply_patch"), stream=True, tool_choice=patch).content)
        (found,) = events[-1]["response"]["output"]
        assert (found["type"], found["name"]) == ("custom_tool_call", "apply_patch")
        kinds = [event["type"] for event in events]
        assert kinds[-3:] == [
            "response.custom_tool_call_input.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert not [kind for kind in kinds if "function_call" in kind]


@pytest.mark.one_runtime
def test_conversation_of_an_agent_is_understood(llama_server: str, tiny_model: Path, template: str) -> None:
    custom = {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": PATCH}
    items = [
        SYSTEM,
        SYSTEM,
        USER,
        call("get_weather", json.dumps({"city": "Paris"}), namespace="mcp__weather"),
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        custom,
        {"type": "custom_tool_call_output", "call_id": "2", "output": "Done."},
    ]
    with llamasup(tiny_model, "--runtime", llama_server, "--", "--chat-template-file", template) as running:
        running.wait_for("ready")
        answer = ask(running, *items)
        assert answer.status_code == 200, answer.text
        ignored = ask(running, USER, tools=[{"type": "web_search"}, APPLY_PATCH])
        assert ignored.headers["x-llamasup-ignored-tools"] == "web_search"


@pytest.mark.one_runtime
def test_llama_server_alone_does_not_know_them(
    llama_server: str, tiny_model: Path, template: str, tmp_path: Path
) -> None:
    path = tmp_path / "bare.sock"
    model = ("--model", str(tiny_model), "--jinja", "--chat-template-file", template)
    custom = {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": PATCH}
    with bare_server(llama_server, path, *model):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client:

            def answered(*items: Any) -> tuple[int, str]:
                body = {"input": items, "tools": [WEATHER, APPLY_PATCH], "max_output_tokens": 2}
                answer = client.post("/v1/responses", json=body)
                return answer.status_code, answer.text

            assert "Cannot determine type of 'item'" in answered(USER, custom)[1]
            assert "Only one system message." in answered(SYSTEM, SYSTEM, USER)[1]
            code, text = answered(USER)
            assert (code, json.loads(text)["output"][0]["type"]) == (200, "message")  # without the tools


LATER = [
    {"role": "system", "content": "One."},
    {"role": "user", "content": "Two."},
    {"role": "system", "content": "Three."},
    {"role": "user", "content": "Four."},
]
DROPS = """\
{%- for message in messages %}{% if message.role != 'system' or loop.first %}{{ message.content }} {% endif %}
{%- endfor %}"""


@pytest.mark.one_runtime
@pytest.mark.parametrize("changes", [TEMPLATE, DROPS, None], ids=["refused", "dropped", "kept"])
def test_system_message_in_the_middle_reaches_the_model(
    llama_server: str, tiny_model: Path, tmp_path: Path, changes: str | None
) -> None:
    """``None``: the template of the model keeps it, and gets it as it is."""
    options: tuple[str, ...] = ()
    if changes is not None:
        (tmp_path / "template.jinja").write_text(changes)
        options = ("--", "--chat-template-file", str(tmp_path / "template.jinja"))
    with llamasup(tiny_model, "--runtime", llama_server, *options) as running:
        running.wait_for("ready")

        def prompt_tokens(path: str, messages: list[Any], name: str = "messages") -> tuple[int, str | None]:
            limits = {"max_tokens": 1, "max_output_tokens": 1}
            answer = httpx.post(f"{running.url}{path}", json={name: messages, **limits}, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
            cached = usage.get("cache_read_input_tokens", 0)  # Anthropic counts the others only
            return tokens + cached, answer.headers.get("x-llamasup-moved-system")

        marked = None if changes is None else "1"
        for path, name in (
            ("/v1/chat/completions", "messages"),
            ("/v1/messages", "messages"),
            ("/v1/responses", "input"),
        ):
            whole, moved = prompt_tokens(path, LATER, name)
            assert moved == marked
            without, none = prompt_tokens(path, [*LATER[:2], LATER[3]], name)
            assert none is None
            assert whole > without
