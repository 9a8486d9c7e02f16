"""Models of classes without chat, served end to end, and files that are no models."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llamasup import serve
from llamasup.core.gguf import architectures
from tests.e2e.driver import Llamasup, llamasup, run_to_end, started
from tests.kit import models, speculative, vision
from tests.kit.architectures import tiny_model as tiny_of
from tests.kit.gguf_writer import TensorPlan, write_gguf
from tests.kit.runtimes import capabilities_of
from tests.kit.tiny import tiny_keys, tiny_tensors

MEAN, CLS, LAST = 1, 2, 3
WIDTH = 64


def embedding_decoder() -> bytes:
    """A decoder that gives the embedding of the last token, as Qwen3-Embedding does."""
    return write_gguf(tiny_keys() | {"llama.pooling_type": LAST}, tiny_tensors())


ENCODERS: dict[str, Callable[[], bytes]] = {
    "mean": lambda: models.tiny_encoder(MEAN),
    "cls": lambda: models.tiny_encoder(CLS),
    "last": embedding_decoder,
}


@pytest.fixture(params=ENCODERS)
def pooling(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoder(pooling: str, tmp_path: Path) -> Path:
    path = tmp_path / f"{pooling}.gguf"
    path.write_bytes(ENCODERS[pooling]())
    return path


@pytest.fixture
def server(encoder: Path, runtime: str) -> Iterator[Llamasup]:
    # With flash attention, a vector of b10068 depends on its place in the batch, in the second decimal.
    with llamasup(encoder, "--runtime", runtime, "--flash-attn", "off") as running:
        running.wait_for("ready")
        yield running
        assert running.stop() == 0


def embeddings(server: Llamasup, texts: str | list[str]) -> list[list[float]]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="any", input=texts)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def close(one: Sequence[float], other: Sequence[float]) -> bool:
    return math.dist(one, other) < 1e-3


def test_single_multiple_and_long_texts_are_embedded(server: Llamasup, pooling: str) -> None:
    (one,) = embeddings(server, "hello world")
    several = embeddings(server, ["hello world", "cat", "dog", "cat", "a", "b"])
    # Longer than the default micro-batch (512) if the model's context allows it.
    words = 600 if pooling == "last" else 500
    (long,) = embeddings(server, "cat " * words)
    more_at_once = embeddings(server, ["dog " * words] * 6)

    assert [len(vector) for vector in (one, *several, long)] == [WIDTH] * 8
    assert close(several[0], one)
    assert close(several[1], several[3])
    assert not close(several[1], several[2])
    assert all(close(vector, more_at_once[0]) for vector in more_at_once)
    assert math.hypot(*one) == pytest.approx(1, abs=1e-3)


def test_input_longer_than_the_context_is_refused_and_others_are_served(server: Llamasup) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "cat " * 40_000}, timeout=60)
    assert answer.status_code in (400, 500)
    assert "error" in answer.json()
    assert len(embeddings(server, "cat")) == 1


@pytest.mark.contract
def test_default_pooling_is_that_of_the_model_file(pooling: str, encoder: Path, llama_server: str) -> None:
    vectors = {}
    for kind in ("", "mean", "cls", "last"):
        extra_args = ("--", "--pooling", kind) if kind else ()
        with llamasup(encoder, "--runtime", llama_server, *extra_args) as running:
            (vectors[kind],) = embeddings(running, "hello big world")
            assert running.stop() == 0
    assert [kind for kind in ("mean", "cls", "last") if close(vectors[kind], vectors[""])] == [pooling]


# --- reranker ------------------------------------------------------------------------------------


@pytest.mark.contract
def test_a_reranker_scores_documents(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "reranker.gguf"
    path.write_bytes(models.tiny_reranker())
    documents = ["dog", "hello world", "dog", "cat " * 400, "x", "y"]
    with llamasup(path, "--runtime", runtime) as running:
        answers = [
            httpx.post(f"{running.url}{endpoint}", json={"query": "cat", "documents": documents}, timeout=60)
            for endpoint in ("/v1/rerank", "/rerank")
        ]
        first = httpx.post(
            f"{running.url}/v1/rerank", json={"query": "cat", "documents": documents, "top_n": 2}, timeout=60
        ).json()["results"]
        chat = httpx.post(f"{running.url}/completion", json={"prompt": "cat", "n_predict": 2}, timeout=60)
        assert running.stop() == 0

    for answer in answers:
        assert answer.status_code == 200, answer.text
        results = answer.json()["results"]
        scores = {result["index"]: result["relevance_score"] for result in results}
        assert sorted(scores) == list(range(len(documents)))
        assert scores[0] == pytest.approx(scores[2], abs=1e-5)
        assert len({round(score, 4) for score in scores.values()}) > 3
    assert len(first) == 2
    assert chat.status_code >= 400  # it is no chat model


# --- encoder and decoder -------------------------------------------------------------------------


def test_encoder_decoder_gets_one_slot_and_answers(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "t5.gguf"
    path.write_bytes(tiny_of("t5"))
    with llamasup(path, "--runtime", runtime) as running:
        props = httpx.get(f"{running.url}/props").json()
        answers = [
            httpx.post(
                f"{running.url}/completion", json={"prompt": prompt, "n_predict": 5}, timeout=60
            ).json()
            for prompt in ("Hello", "Hello again " * 200)
        ]
        assert running.stop() == 0
    assert props["total_slots"] == 1
    assert [answer["tokens_predicted"] for answer in answers] == [5, 5]


# --- no models -----------------------------------------------------------------------------------


def imatrix() -> bytes:
    return write_gguf({"general.type": "imatrix", "general.architecture": "llama"}, [])


def image_model() -> bytes:
    tensor = TensorPlan("double_blocks.0.img_attn.qkv.weight", (64, 64))
    return write_gguf(
        {"general.architecture": "flux", "general.file_type": 14}, [(tensor, bytes(4 * 64 * 64))]
    )


NOT_SERVED: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "adapter": (models.tiny_lora, "is a LoRA adapter, not a model", "after -- as --lora FILE"),
    "projector": (vision.vision_projector, "is a multimodal projector, not a model", "as --mmproj"),
    "vocabulary": (
        models.vocabulary_only,
        "is a vocabulary without weights, not a model",
        "with the weights",
    ),
    "head": (speculative.draft_head, "is a draft head, not a model", "--draft-model"),
    "mtp": (speculative.mtp_head, "is a draft head, not a model", "--draft-model"),
    "importance": (
        imatrix,
        "is an importance matrix, which llama-quantize reads, not a model",
        "language model",
    ),
    "images": (image_model, "is an image or video model (flux), not a model", "language model"),
}


@pytest.mark.parametrize("kind", NOT_SERVED)
def test_file_that_is_no_model_is_refused_with_its_use(kind: str, llama_server: str, tmp_path: Path) -> None:
    make, message, remedy = NOT_SERVED[kind]
    path = tmp_path / f"{kind}.gguf"
    path.write_bytes(make())
    ended = run_to_end("run", str(path), "--port", "0", "--runtime", llama_server)
    print(ended.stderr)
    assert ended.returncode == 65
    assert message in ended.stderr
    assert remedy in ended.stderr
    assert "Traceback" not in ended.stderr


def test_adapter_refused_as_a_model_works_as_an_adapter(
    llama_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(models.tiny_lora())
    own = tmp_path / "model" / "tiny.gguf"
    own.parent.mkdir()
    shutil.copy(tiny_model, own)
    with llamasup(own, "--runtime", llama_server, "--", "--lora", str(adapter)) as running:
        adapters: list[dict[str, Any]] = httpx.get(f"{running.url}/lora-adapters").json()
        assert running.stop() == 0
    assert [Path(one_adapter["path"]).name for one_adapter in adapters] == ["adapter.gguf"]


# --- architectures that llamasup does not know ---------------------------------------------------


def newer_model(architecture: str) -> bytes:
    """A tiny llama under another architecture's name."""
    keys = {name.replace("llama.", f"{architecture}."): value for name, value in tiny_keys().items()}
    return write_gguf(keys | {"general.architecture": architecture}, tiny_tensors())


@pytest.mark.contract
@pytest.mark.parametrize("architecture", ["nosuch", "llama5", "qwen7-next"])
def test_a_build_that_does_not_know_the_architecture_is_named(
    architecture: str, runtime: str, tmp_path: Path
) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(newer_model(architecture))
    ended = run_to_end("run", str(path), "--port", "0", "--runtime", runtime)
    print(ended.stderr)
    assert ended.returncode == 65
    said = " ".join(ended.stderr.split())
    assert f"llamasup does not know the architecture '{architecture}'" in said
    assert re.search(rf"This llama-server \(\S.*\) does not know the architecture '{architecture}'", said)
    assert "Traceback" not in ended.stderr


@pytest.mark.contract
def test_a_model_that_only_the_build_knows_is_served(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architectures, "KNOWN", architectures.KNOWN - {"llama"})
    path = tmp_path / "llama.gguf"
    path.write_bytes(newer_model("llama"))
    with serve(str(path), runtime=runtime) as server:
        answer = server.client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4})
        assert answer.raise_for_status().json()["usage"]["completion_tokens"] == 4


# --- decision models ------------------------------------------------------------------------------

QUESTIONS = {
    "angry": {"type": "noul", "instructions": "Is the customer angry?"},
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": None, "shipping": None},
    },
}


def decided(url: str, model: str, words: int = 1) -> httpx.Response:
    body = {"model": model, "state": "the " * words, "questions": QUESTIONS}
    return httpx.post(f"{url}/v1/systemone", json=body, timeout=60)


def makes_decisions(runtime: str, kind: str) -> bool:
    """b11361 has the endpoint and four types; a build that knows ``pplx-decider`` has its name in a file."""
    if runtime == "embedded":
        return True
    files = [path for path in Path(runtime).resolve().parents[1].rglob("*") if path.is_file()]
    knows_type = kind != "pplx-decider" or any(kind.encode() in path.read_bytes() for path in files)
    return knows_type and capabilities_of(runtime).knows("--log-jsonl") is not None


@pytest.mark.parametrize("kind", ["openjev", "lev", "nimble", "pplx-decider", "kev"])
def test_decision_model_is_proven_with_a_decision_and_counted(
    kind: str, runtime: str, tmp_path: Path
) -> None:
    """The body is that of the README of ggml-org/llama.cpp#29818; a build without the endpoint is named."""
    path = tmp_path / f"{kind}.gguf"
    path.write_bytes(models.tiny_decider(kind))
    if runtime != "embedded" and not makes_decisions(runtime, kind):
        ended = run_to_end("run", str(path), "--port", "0", "--runtime", runtime)
        assert ended.returncode == 65, ended.stderr
        has_endpoint = capabilities_of(runtime).knows("--log-jsonl")  # since b11361
        refusal = "unsupported decision model type" if has_endpoint else "llama-server has no /v1/systemone"
        assert refusal in ended.stderr
        return
    with llamasup(path, "--runtime", runtime) as running:
        running.wait_for("ready")
        for words in (1, 600, 2000):
            answer = decided(running.url, "any", words).raise_for_status().json()
            assert 0 <= answer["answers"]["angry"]["noul"] <= 1
            assert sum(answer["answers"]["team"]["probabilities"].values()) == pytest.approx(1)
        metrics = httpx.get(f"{running.url}/metrics").text
        assert re.search(r'llamasup_requests_total{code="200",.*route="/v1/systemone"} 3', metrics)
        assert re.search(r'llamasup_tokens_total{kind="prompt",.*} (?!0)\d{4,}', metrics)
        assert running.stop() == 0


def test_decision_models_are_listed_and_get_only_the_work_that_they_can_do(tmp_path: Path) -> None:
    """The header of ``clef`` says that it makes only decisions; b11549 cannot load it without the head."""
    for kind in ("lev", "clef", "future-d9"):
        (tmp_path / f"{kind}.gguf").write_bytes(models.tiny_decider(kind))
    (tmp_path / "chat.gguf").write_bytes(models.tiny_decoder())
    with started("serve", "--models-dir", str(tmp_path), "--port", "0", "--runtime", "embedded") as running:
        running.wait_for("ready")
        listed = httpx.get(f"{running.url}/v1/models").json()["data"]
        results = {model["id"]: model["architecture"]["output_modalities"] for model in listed}
        decides = ["decisions"]
        assert results == {"lev": decides, "clef": decides, "future-d9": decides, "chat": ["text"]}

        def chat(model: str) -> httpx.Response:
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            return httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)

        refused = [chat("clef"), decided(running.url, "chat")]
        assert [(answer.status_code, answer.json()["error"]["cause"]) for answer in refused] == [
            (400, "model_purpose")
        ] * 2
        assert [decided(running.url, "lev").status_code, chat("lev").status_code] == [200, 200]
        unknown = decided(running.url, "future-d9").json()["error"]
        assert unknown["cause"] == "model_unsupported"
        assert "unsupported decision model type: future-d9" in unknown["message"]
        assert running.stop() == 0
