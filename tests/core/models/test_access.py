"""The work of a model, the keys that may use it, and the errors for other requests."""

from __future__ import annotations

import pytest

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.http.routes import Work, route_of
from llamasup.core.models.access import (
    ResolvedModel,
    forbidden_model,
    may_use,
    output_modalities,
    resolved,
    unfit_model,
    unknown_model,
    unnamed_model,
)
from llamasup.core.models.spec import ModelSpec
from llamasup.core.settings.model import Settings
from tests.core.planning.plans import bert, model

ALL = tuple(Work)


def works(facts: ModelFacts | None, *extra: str) -> tuple[Work, ...]:
    return resolved(ModelSpec("m", "/m.gguf", settings=Settings(extra=extra), listed=facts)).works


def key(*models: str) -> ApiKey:
    return ApiKey("alice", b"", b"", models=models)


# --- the work of a model


def test_class_decides_the_work_of_a_model() -> None:
    assert works(model()) == (Work.TEXT,)
    assert works(bert()) == (Work.EMBEDDINGS,)
    assert works(bert(ModelClass.RERANKER)) == (Work.EMBEDDINGS, Work.RERANKING)
    assert works(model(model_class=ModelClass.ENCODER, pooling="last")) == (Work.TEXT, Work.EMBEDDINGS)


@pytest.mark.parametrize("kind", ["openjev", "lev", "nimble", "pplx-decider", "kev", "lfm2-d1", "future-d9"])
def test_a_decision_model_chats_if_llama_server_lets_it(kind: str) -> None:
    """Each of them answered a chat of a server without the check (run: b11549). So did ncchinh/quyet."""
    facts = model(model_class=ModelClass.DECISION, decision=kind)
    assert works(facts) == (Work.TEXT, Work.DECISIONS)
    assert output_modalities(facts, works(facts)) == ("decisions",)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(bert(ModelClass.DECISION, decision="laya"), id="laya"),
        pytest.param(bert(ModelClass.DECISION, decision="future-d9"), id="an encoder of an unknown type"),
        pytest.param(model(model_class=ModelClass.DECISION, decision="clef"), id="clef"),
        pytest.param(model(model_class=ModelClass.DECISION, decision="lfm2-d1-omni"), id="lfm2-d1-omni"),
    ],
)
def test_a_decision_model_without_text_refuses_chats(facts: ModelFacts) -> None:
    """llama.cpp, tools/server/README.md: no text of clef; the others have no causal attention (#29818).
    nullata/llamaMan#104 and lemonade-sdk/lemonade#3751 refuse such chats, too.
    """
    assert works(facts) == (Work.DECISIONS,)
    error = unfit_model(ResolvedModel(("d",), works(facts)), Work.TEXT)
    assert (error.status, error.cause) == (400, "model_purpose")
    assert error.message == "The model 'd' generates no text"
    assert "it is for decisions" in error.remedy.replace("It", "it")


def test_other_models_make_no_decisions() -> None:
    error = unfit_model(ResolvedModel(("m",), works(model())), Work.DECISIONS)
    assert (error.status, error.message) == (400, "The model 'm' makes no decisions")


def test_recurrent_model_generates_text_without_a_cache() -> None:
    facts = model(recurrent_layers=(True,) * 32, kv_layers=(False,) * 32)
    assert works(facts) == (Work.TEXT,)


@pytest.mark.parametrize("flag", ["--embedding", "--embeddings", "--rerank", "--reranking", "--pooling=rank"])
def test_purpose_flag_or_unread_file_allows_all_work(flag: str) -> None:
    assert works(model(), "--threads", "2", flag) == ALL
    assert works(None) == ALL
    assert works(bert(ModelClass.DECODER)) == ALL  # an unknown combination


def test_routes_have_the_work_that_they_need() -> None:
    for path, work in {
        b"/v1/chat/completions": Work.TEXT,
        b"/infill": Work.TEXT,
        b"/embedding": Work.EMBEDDINGS,
        b"/v1/rerank": Work.RERANKING,
        b"/v1/systemone": Work.DECISIONS,
        b"/v1/audio/transcriptions": None,
        b"/tokenize": None,
        b"/props": None,
    }.items():
        assert route_of(path).work is work
    for path in (b"/v1/models", b"/v1/models/a/b", b"/models", b"/models/a"):
        assert route_of(path).lists
    assert not route_of(b"/v1/modelsx").lists


# --- the models of a key

QWEN = ResolvedModel(("qwen2.5-7b", "gpt-4o-mini"))


@pytest.mark.parametrize(
    ("models", "may"),
    [
        ((), True),
        (("qwen2.5-7b",), True),
        (("QWEN*",), True),
        (("tiny", "gpt-4o-????"), True),
        (("*",), True),
        (("qwen2.5",), False),
        (("qwen205-7b",), False),
        (("tiny",), False),
    ],
)
def test_key_allows_a_model_by_any_of_its_names(models: tuple[str, ...], may: bool) -> None:
    assert may_use(key(*models), QWEN) is may


def test_request_without_a_key_may_use_any_model() -> None:
    assert may_use(None, QWEN)


# --- errors


def test_unknown_model_error_suggests_similar_names() -> None:
    error = unknown_model("qwen", ["qwen2.5-7b", "qwen3"])
    assert (error.status, error.type, error.cause) == (404, "invalid_request_error", "model_not_found")
    assert error.message == "The model 'qwen' does not exist"
    assert error.remedy == "did you mean qwen2.5-7b or qwen3?"
    assert unknown_model("x").remedy == "GET /v1/models lists the models"


def test_unknown_name_is_shortened_in_the_error() -> None:
    assert len(unknown_model("x" * 10_000_000).message) < 200
    assert "\n" not in unknown_model("two\nlines").message


def test_unnamed_model_error_lists_at_most_ten() -> None:
    error = unnamed_model([f"m{n}" for n in range(12)])
    assert error.status == 400
    assert error.remedy == 'set "model" to m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, … (12 in all)'
    assert unnamed_model(["a", "b", "c"]).remedy == 'set "model" to a, b or c'
    assert unnamed_model(["a"]).remedy == 'set "model" to a'
    assert unnamed_model([]).remedy == "no model is served: add one"


def test_unfit_model_error_says_what_it_is_for() -> None:
    error = unfit_model(ResolvedModel(("bge",), (Work.EMBEDDINGS, Work.RERANKING)), Work.TEXT)
    assert (error.status, error.cause) == (400, "model_purpose")
    assert error.message == "The model 'bge' generates no text"
    assert error.remedy.startswith("it is for embeddings and reranking;")
    assert (
        unfit_model(ResolvedModel(("m",), (Work.TEXT,)), Work.RERANKING).message
        == "The model 'm' does not rerank"
    )


def test_forbidden_model_error_lists_only_allowed_models() -> None:
    error = forbidden_model(key("qwen*", "tiny"), "secret")
    assert (error.status, error.type, error.cause) == (403, "permission_error", "key_models")
    assert error.message == "the key 'alice' may not use the model 'secret'"
    assert error.remedy == "use a model that the key allows: qwen* or tiny"
    assert forbidden_model(key("tiny"), None).message == "the key 'alice' may not use the default model"
