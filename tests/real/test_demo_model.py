"""The demo model and the tiny test models on a real llama-server, and files that it refuses."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.gguf.files import read_model
from llamasup.errors import ModelInvalid
from tests.kit import models

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 24,
    "temperature": 0,
}


class Ended(Exception):
    """llama-server ended while starting; the argument is its log."""


# llama-server closes idle connections after 5 s, and a busy machine may pause the client for as long.
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture
def serve(llama_server: str, tmp_path: Path) -> Callable[..., Any]:
    """``with serve(path, *flags) as client``: a server on a free port, and an HTTP client for it."""
    environ = {"PATH": os.environ.get("PATH", ""), "XDG_CONFIG_HOME": str(tmp_path)}
    environ["LD_LIBRARY_PATH"] = str(Path(llama_server).parent)

    @contextmanager
    def serving(path: Path, *flags: str) -> Iterator[httpx.Client]:
        argv = [llama_server, "--model", str(path), "--host", "127.0.0.1", "--port", "0", "--threads", "1"]
        child = subprocess.Popen(
            [*argv, "--parallel", "1", "--ctx-size", "512", "--offline", *flags],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert child.stderr is not None
        try:
            log = []
            for line in child.stderr:  # ends when the child does
                log.append(line)
                if "listening on http" in line:
                    break
            else:
                raise Ended("".join(log))
            url = line.rsplit("listening on ", 1)[1].strip()
            with httpx.Client(base_url=url, timeout=30, trust_env=False, limits=NO_KEEP_ALIVE) as client:
                assert client.get("/health").json() == {"status": "ok"}
                yield client
        finally:
            child.terminate()
            try:
                child.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                # A SIGTERM right after the ready line can be lost (b11434); that is not tested here.
                child.kill()
                child.communicate()

    return serving


def saved(tmp_path: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def chat(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json=HELLO | changes)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def streamed(client: httpx.Client) -> str:
    pieces = []
    body = HELLO | {"stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = msgspec.json.decode(line.removeprefix("data: "))["choices"]
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    return "".join(pieces)


def test_demo_model_answers_max_tokens_words_deterministically(
    serve: Callable[..., Any], tiny_model: Path
) -> None:
    with serve(tiny_model) as client:
        first, second = chat(client), chat(client)
        assert text_of(first) == text_of(second)
        assert first["usage"]["completion_tokens"] == HELLO["max_tokens"]
        assert first["choices"][0]["finish_reason"] == "length"
        words = text_of(first).split()
        assert len(words) == HELLO["max_tokens"]
        assert all(word.isascii() and word.isalpha() for word in words)
        assert len(set(words)) > 6

        assert streamed(client) == text_of(first)
        other = chat(client, messages=[{"role": "user", "content": "What is the capital of France?"}])
        assert text_of(other) != text_of(first)
        warm = chat(client, temperature=1.0, seed=7, max_tokens=200)
        assert warm["usage"]["completion_tokens"] == 200


def test_demo_model_runs_with_quantized_kv_cache_and_as_its_own_draft(
    serve: Callable[..., Any], tiny_model: Path
) -> None:
    quantised = ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--flash-attn", "on")
    draft = ("--spec-draft-model", str(tiny_model), "--spec-type", "draft-simple")
    with serve(tiny_model, *quantised, *draft) as client:
        timings = chat(client)["timings"]
    # Not all are accepted: the draft's own KV cache is f16, so the two differ a little.
    assert timings["draft_n_accepted"] > timings["draft_n"] / 2 > 0


def test_facts_read_from_the_file_equal_those_that_the_server_reports(
    serve: Callable[..., Any], tiny_model: Path
) -> None:
    facts = read_model(tiny_model)
    with serve(tiny_model) as client:
        (meta,) = client.get("/v1/models").json()["data"]
    assert meta["meta"]["n_ctx_train"] == facts.context_length
    assert meta["meta"]["n_vocab"] == facts.vocab_size
    assert meta["meta"]["n_embd"] == facts.embedding_length
    assert meta["meta"]["n_params"] == facts.parameters
    assert meta["meta"]["size"] == facts.weights_bytes


def test_split_model_answers_like_the_single_file(
    serve: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    parts = models.write_split_decoder(tmp_path)
    with serve(tiny_model) as client:
        whole = text_of(chat(client))
    with serve(parts[0]) as client:
        assert text_of(chat(client)) == whole


def test_lora_adapter_changes_the_answer(serve: Callable[..., Any], tiny_model: Path, tmp_path: Path) -> None:
    adapter = saved(tmp_path, models.tiny_lora())
    with serve(tiny_model) as client:
        without = text_of(chat(client))
    with serve(tiny_model, "--lora", str(adapter)) as client:
        assert text_of(chat(client)) != without


def test_model_with_the_other_vocabulary_chats(serve: Callable[..., Any], tmp_path: Path) -> None:
    with serve(saved(tmp_path, models.other_vocabulary())) as client:
        assert text_of(chat(client)).startswith(" other")


def test_large_decoder_chats(serve: Callable[..., Any], tmp_path: Path) -> None:
    path = models.write_large_decoder(tmp_path / "large.gguf", 40_000_000, quantization="F16")
    with serve(path) as client:
        assert chat(client, ignore_eos=True)["usage"]["completion_tokens"] == HELLO["max_tokens"]


@pytest.mark.parametrize("pooling_type", [1, 2], ids=["mean", "cls"])
def test_tiny_encoder_returns_embeddings(
    pooling_type: int, serve: Callable[..., Any], tmp_path: Path
) -> None:
    path = saved(tmp_path, models.tiny_encoder(pooling_type))
    with serve(path, "--embedding") as client:
        answer = client.post("/v1/embeddings", json={"input": ["hello world", "cat", "cat"]}).json()
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert [len(vector) for vector in vectors] == [read_model(path).embedding_length] * 3
    assert vectors[1] == pytest.approx(vectors[2], abs=1e-5)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)


def test_tiny_reranker_ranks_documents(serve: Callable[..., Any], tmp_path: Path) -> None:
    with serve(saved(tmp_path, models.tiny_reranker()), "--rerank") as client:
        body = {"query": "cat", "documents": ["dog", "hello world", "dog"]}
        results = client.post("/v1/rerank", json=body).json()["results"]
    scores = {entry["index"]: entry["relevance_score"] for entry in results}
    assert scores[0] == pytest.approx(scores[2], abs=1e-5)
    assert scores[0] != pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize(
    ("make", "model_class", "says"),
    [
        (models.vocabulary_only, ModelClass.VOCAB, "(?:missing )?tensor 'token_embd.weight'"),
        (
            models.tiny_projector,
            ModelClass.PROJECTOR,
            "CLIP cannot be used as main model|unsupported model architecture: 'clip'",
        ),
        (models.tiny_lora, ModelClass.LORA, "key not found in model"),
        (models.big_endian_decoder, ModelClass.DECODER, "mismatch between the host and model endianness"),
    ],
    ids=["vocabulary only", "projector", "lora", "big-endian"],
)
def test_llama_server_also_refuses_files_classified_as_no_models(
    make: Callable[[], bytes],
    model_class: ModelClass,
    says: str,
    serve: Callable[..., Any],
    tmp_path: Path,
) -> None:
    path = saved(tmp_path, make())
    assert read_model(path).model_class is model_class
    logs = []
    for _ in range(10):  # b10068 may exit before its thread for the log has written all of it
        with pytest.raises(Ended) as ended, serve(path):
            pass
        logs.append(str(ended.value))
        if re.search(says, logs[-1]):
            break
    else:
        pytest.fail(f"{says} is in none of {logs}")


def damaged(change: Callable[[bytearray], None]) -> bytes:
    content = bytearray(models.tiny_decoder())
    change(content)
    return bytes(content)


def moved_tensor(content: bytearray) -> None:
    """The offset of the second tensor, after its name, one dimension (4 + 8) and type (4)."""
    at = content.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 16
    content[at : at + 8] = (1 << 40).to_bytes(8, "little")


def unknown_type(content: bytearray) -> None:
    at = content.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 12
    content[at] = 77


def twice(content: bytearray) -> None:
    at = content.index(b"blk.1.attn_norm.weight")
    content[at : at + 6] = b"blk.0."


def key_twice(content: bytearray) -> None:
    at = content.index(b"general.name")
    content[at : at + 12] = b"general.type"


def truncate(content: bytearray) -> None:
    del content[len(content) // 2 :]


@pytest.mark.parametrize(
    "change",
    [moved_tensor, unknown_type, twice, key_twice, truncate],
    ids=lambda change: change.__name__.replace("_", " "),
)
def test_llama_server_also_refuses_damaged_files_that_llamasup_refuses(
    change: Callable[[bytearray], None], serve: Callable[..., Any], tmp_path: Path
) -> None:
    path = saved(tmp_path, damaged(change))
    with pytest.raises(ModelInvalid):
        read_model(path)
    with pytest.raises(Ended), serve(path):
        pass
