"""A server that dies while all clients read answers: no client takes its part for complete (S12)."""

from __future__ import annotations

import importlib
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.clients.conftest import KEY, LONG, PATIENCE_S, Serve, Served
from tests.clients.prompts import QUESTION

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),  # of litellm's classes
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),
]

Reader = Callable[[Served, Callable[[], None]], None]
"""Reads a long stream to its end; calls back once something of it has come."""


def by_openai(served: Served, report_progress: Callable[[], None]) -> None:
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0) as client:
        for _ in client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": QUESTION}], max_tokens=LONG, stream=True
        ):
            report_progress()


def by_openai_responses(served: Served, report_progress: Callable[[], None]) -> None:
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0) as client:
        for event in client.responses.create(
            model="tiny", input=QUESTION, max_output_tokens=LONG, stream=True
        ):
            if event.type == "response.output_text.delta":
                report_progress()


def by_anthropic(served: Served, report_progress: Callable[[], None]) -> None:
    with (
        anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client,
        client.messages.stream(
            model="tiny", messages=[{"role": "user", "content": QUESTION}], max_tokens=LONG
        ) as stream,
    ):
        for _ in stream.text_stream:
            report_progress()


def by_litellm(served: Served, report_progress: Callable[[], None]) -> None:
    litellm = importlib.import_module("litellm")
    for _ in litellm.completion(
        model="openai/tiny",
        api_base=served.v1,
        api_key=KEY,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=LONG,
        max_retries=0,
        stream=True,
    ):
        report_progress()


def by_langchain(served: Served, report_progress: Callable[[], None]) -> None:
    model = ChatOpenAI(
        base_url=served.v1,
        api_key=SecretStr(KEY),
        model="tiny",
        max_retries=0,
        max_tokens=LONG,  # type: ignore[call-arg]
    )
    for _ in model.stream(QUESTION):
        report_progress()


def by_httpx(served: Served, report_progress: Callable[[], None]) -> None:
    body = {"prompt": "Once", "n_predict": LONG, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream(
        "POST", f"{served.url}/completion", json=body, headers=headers, timeout=PATIENCE_S
    ) as response:
        for _ in response.iter_raw():
            report_progress()


READERS: dict[str, tuple[Reader, type[Exception]]] = {
    # The slow ones first: the answer of a fast one might end before their streams have begun.
    "litellm": (by_litellm, Exception),  # of several classes, by what it read last
    "langchain": (by_langchain, openai.APIError),
    "openai": (by_openai, openai.APIError),
    "openai, responses": (by_openai_responses, openai.APIError),
    "anthropic": (by_anthropic, anthropic.APIError),
    "httpx": (by_httpx, httpx.RemoteProtocolError),
}


@pytest.fixture(scope="module")
def crowded(serve: Serve, tiny_model: Path) -> Served:
    """A slot for each client, so that all of them are in mid-stream at once."""
    return serve(tiny_model, "--ctx-size", "32768", "--parallel", str(len(READERS)))


@pytest.mark.usefixtures("litellm")
def test_no_client_accepts_a_cut_stream_as_complete(crowded: Served) -> None:
    flowing = {name: threading.Event() for name in READERS}
    with ThreadPoolExecutor(len(READERS)) as threads:
        reading = {}
        for name, (read, _) in READERS.items():
            reading[name] = threads.submit(read, crowded, flowing[name].set)
            assert flowing[name].wait(PATIENCE_S), reading[name]
        (child,) = [process for process in crowded.running.children() if "--host" in process.cmdline()]
        child.send_signal(signal.SIGKILL)
        errors = {name: future.exception(PATIENCE_S) for name, future in reading.items()}
    for name, error in errors.items():
        print(f"{name}: {type(error).__name__}: {str(error)[:100]}")
    assert {name: isinstance(error, READERS[name][1]) for name, error in errors.items()} == dict.fromkeys(
        READERS, True
    ), errors


def test_curl_reports_a_cut_stream_with_its_exit_code(crowded: Served, curl: str) -> None:
    with subprocess.Popen(
        [curl, "-sSN", f"{crowded.url}/completion", "-H", f"Authorization: Bearer {KEY}",
         "-d", f'{{"prompt":"Once","stream":true,"n_predict":{LONG}}}'],
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: ")
        (child,) = [process for process in crowded.running.children() if "--host" in process.cmdline()]
        child.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
    assert process.returncode == 18  # CURLE_PARTIAL_FILE
    assert b'data: {"error":' in rest.splitlines()[-2] + rest.splitlines()[-1]
