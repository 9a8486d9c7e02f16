"""A server that dies while a client reads its answer: with --continue-streams, the client gets all of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.clients.conftest import KEY, Served
from tests.e2e.driver import llamasup
from tests.extended.real.continued_streams import QUESTION
from tests.kit.ports import free_port
from tests.real.remains import folders_of

TOKENS = 90
TRIES = 4  # a fast server may have sent the whole answer before it is killed; five crashes are a crash loop
CONTINUED = 'llamasup_continued_streams_total{model="demo",result="continued"}'
Reader = Callable[[Served], Iterator[str]]


def by_openai(served: Served) -> Iterator[str]:
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        ids = set()
        for chunk in stream:
            ids.add(chunk.id)
            yield from (choice.delta.content for choice in chunk.choices if choice.delta.content)
            if chunk.usage is not None:
                assert chunk.usage.completion_tokens == TOKENS
        assert len(ids) == 1


def by_openai_responses(served: Served) -> Iterator[str]:
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0) as client:
        text = ""
        for event in client.responses.create(
            model="demo", input=QUESTION, temperature=0, max_output_tokens=TOKENS, stream=True
        ):
            if event.type == "response.output_text.delta":
                text += event.delta
                yield event.delta
            elif event.type == "response.completed":
                assert event.response.output_text == text


def by_anthropic(served: Served) -> Iterator[str]:
    with (
        anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client,
        client.messages.stream(
            model="demo",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=TOKENS,
            extra_body={"temperature": 0},
        ) as stream,
    ):
        yield from stream.text_stream
        message: Any = stream.get_final_message()
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", TOKENS)


def by_ollama(served: Served) -> Iterator[str]:
    address = served.running.wait_for("ready")["ollama"]
    options = {"temperature": 0, "num_predict": TOKENS}
    messages = [{"role": "user", "content": QUESTION}]
    last = None
    with ollama.Client(address, headers={"Authorization": f"Bearer {KEY}"}) as client:
        for last in client.chat("demo", messages, stream=True, options=options):
            if last.message.content:
                yield last.message.content
    assert last is not None
    assert (last.done_reason, last.eval_count) == ("length", TOKENS)


@pytest.mark.parametrize("read", [by_openai, by_openai_responses, by_anthropic, by_ollama])
def test_client_gets_the_whole_answer(read: Reader, runtime: str, own_folders: Path) -> None:
    keys = own_folders / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    options = ("--runtime", runtime, "--continue-streams", "--api-key-file", str(keys), "--kv-type", "f16")
    with llamasup(
        "demo", *options, "--parallel", "1", f"--ollama=127.0.0.1:{free_port()}", env=folders_of(own_folders)
    ) as running:
        served = Served(running, running.url)
        whole = "".join(read(served))
        for number in range(1, TRIES + 1):
            text = ""
            (server,) = [child for child in running.children() if "--host" in child.cmdline()]
            for delta in read(served):
                if not text:
                    server.send_signal(signal.SIGKILL)
                text += delta
            assert text == whole
            running.wait_for_ready_after(number)
            if (
                'llamasup_continued_streams_total{model="demo",result="continued"}'
                in served.get("/metrics").text
            ):
                return
        pytest.fail("each answer had arrived before its server was killed")
