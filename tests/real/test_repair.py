"""Conversations with malformed tool calls, which a real llama-server refuses, go through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import Llamasup, llamasup
from tests.features.repair.conversations import BAD_ARGUMENTS, TOOLS, conversation
from tests.features.repair.unusable_answers import UNPARSED, UNPARSED_OPTIONS, WRONG_JSON
from tests.kit.patience import PATIENCE_S

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


SEEDS = range(24)


def ask_all(running: Llamasup, body: dict[str, Any]) -> list[httpx.Response]:
    """The answers for all seeds, which are the same each time: the id decides the second seed."""
    return [
        httpx.post(
            f"{running.url}/v1/chat/completions",
            json={**body, "seed": seed},
            headers={"X-Request-Id": f"request-{seed}"},
            timeout=PATIENCE_S,
        )
        for seed in SEEDS
    ]


def marked(answer: httpx.Response) -> str | None:
    mark: str | None = answer.headers.get("x-llamasup-repaired")
    return mark


def repaired_in_metrics(running: Llamasup, what: str) -> int:
    metrics = httpx.get(f"{running.url}/metrics", timeout=PATIENCE_S).text
    line = f'llamasup_repaired_requests_total{{model="tiny",what="{what}"}} '
    return sum(int(float(each.removeprefix(line))) for each in metrics.splitlines() if each.startswith(line))


def test_answers_that_llama_server_cannot_parse_are_asked_for_again(
    llama_server: str, tiny_model: Path
) -> None:
    options = ("--runtime", llama_server, "--repair", "tools", "--", *UNPARSED_OPTIONS)
    with llamasup(tiny_model, *options) as running:
        running.wait_for("ready")
        answers = ask_all(running, UNPARSED)
        repaired = [answer for answer in answers if marked(answer) == "tool_call"]
        failed = [answer for answer in answers if answer.status_code == 500]
        assert repaired
        assert {answer.status_code for answer in repaired} == {200}
        assert all(marked(answer) is None for answer in failed)
        assert all("does not match the expected" in answer.text for answer in failed)
        assert repaired_in_metrics(running, "tool_call") == len(repaired)
        assert repaired_in_metrics(running, "tool_call_failed") == len(failed)
        streamed = ask_all(running, {**UNPARSED, "stream": True})
        assert "tool_call" in {marked(answer) for answer in streamed}
        assert all("data: [DONE]" in answer.text for answer in streamed if marked(answer))
    with llamasup(tiny_model, "--runtime", llama_server, "--", *UNPARSED_OPTIONS) as running:
        running.wait_for("ready")
        without = ask_all(running, UNPARSED)
        assert sum(answer.status_code == 500 for answer in without) > len(failed)


def test_json_that_does_not_match_its_schema_is_asked_for_again(runtime: str, tiny_model: Path) -> None:
    with llamasup(tiny_model, "--runtime", runtime, "--repair", "json") as running:
        running.wait_for("ready")
        answers = ask_all(running, WRONG_JSON)
        assert {answer.status_code for answer in answers} == {200}
        texts = [(marked(each), each.json()["choices"][0]["message"]["content"]) for each in answers]
        repaired = [json.loads(text) for mark, text in texts if mark == "json"]
        assert repaired
        assert set(repaired) <= {2, 3, 4}
        wrong = sum(text.strip() == "1" for _mark, text in texts)
        assert repaired_in_metrics(running, "json") == len(repaired)
        assert repaired_in_metrics(running, "json_failed") == wrong


def test_schema_that_the_runtime_ignores_is_refused(runtime: str, tiny_model: Path) -> None:
    """The embedded runtime cannot use a ``not`` with ``/completion``, and generates any text."""
    schema = WRONG_JSON["response_format"]["json_schema"]["schema"]
    with llamasup(tiny_model, "--runtime", runtime, "--repair", "json") as running:
        running.wait_for("ready")
        body = {"prompt": "hi", "n_predict": 8, "json_schema": schema}
        answer = ask(running, "/completion", body)
        if runtime == "embedded":
            assert (answer.status_code, answer.json()["error"]["cause"]) == (400, "schema_ignored")
        else:
            assert answer.status_code == 200, answer.text
            assert json.loads(answer.json()["content"]) in {1, 2, 3, 4}
        bad = {"prompt": "hi", "n_predict": 8, "grammar": 'root ::= "a'}
        refused = ask(running, "/completion", bad)  # both refuse a grammar that they cannot parse
        assert refused.status_code == 400
        assert "failed to parse grammar" in refused.text
