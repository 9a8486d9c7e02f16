"""Conversations with malformed tool calls, which a real llama-server refuses, go through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import Llamasup, llamasup
from tests.patience import PATIENCE_S
from tests.repair.conversations import BAD_ARGUMENTS, TOOLS, conversation

pytestmark = pytest.mark.real

CUT_OFF = '{"city": "Par'
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}
{%- for name, value in call.function.arguments | items %} {{ name }}={{ value | tojson }}{% endfor %}</call>
{%- endfor %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""It takes only objects as arguments, as that of Qwen3-Coder."""


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def ask(running: Llamasup, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json={"max_tokens": 2, **body}, timeout=PATIENCE_S)


def test_conversation_with_malformed_tool_calls_goes_on(
    runtime: str, tiny_model: Path, template: str
) -> None:
    options = ("--runtime", runtime, "--repair", "tools", "--", "--chat-template-file", template)
    with llamasup(tiny_model, *options) as running:
        running.wait_for("ready")
        for arguments in BAD_ARGUMENTS:
            answer = ask(running, "/v1/chat/completions", conversation(arguments))
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-llamasup-repaired"] == "arguments"
        shown = ask(running, "/apply-template", conversation(CUT_OFF)).json()["prompt"]
        assert "malformed_arguments=" + json.dumps(CUT_OFF) in shown
        call = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{"}
        result = {"type": "function_call_output", "call_id": "1", "output": "sunny"}
        items = [{"role": "user", "content": "Rome?"}, call, result]
        tools = [{"type": "function", **TOOLS[0]["function"]}]
        answer = ask(running, "/v1/responses", {"input": items, "tools": tools})
        assert answer.status_code == 200, answer.text
        whole = ask(running, "/v1/chat/completions", conversation('{"city": "Paris"}'))
        assert whole.status_code == 200
        assert "x-llamasup-repaired" not in whole.headers


@pytest.mark.one_runtime
def test_llama_server_refuses_them_without_the_repair(runtime: str, tiny_model: Path, template: str) -> None:
    with llamasup(tiny_model, "--runtime", runtime, "--", "--chat-template-file", template) as running:
        running.wait_for("ready")
        answer = ask(running, "/v1/chat/completions", conversation(CUT_OFF))
        assert answer.status_code == 500
        assert "Failed to parse tool call arguments as JSON" in answer.text
