"""The warm-up: the smallest request that shows whether a model works, and the check of its answer.

``/health`` answers 200 once the weights are loaded, but a GPU without memory or a missing kernel only shows
in the first decode (llama.cpp #13085). The warm-up finds that before a client does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.trusted_lines import trusted_head
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import text_of


class WarmUpRequest(Struct, frozen=True):
    path: str
    body: Mapping[str, Any]
    expects: str = ""
    """The content of a valid answer, for messages. Empty: each answer that is no error is valid."""


_TOKEN = WarmUpRequest(
    "/completion",
    # The warm-up must not leave its prompt in a slot's cache.
    {"prompt": "Hello", "n_predict": 1, "temperature": 0.0, "cache_prompt": False},
    "one token",
)
_BEGUN = "One, two, three,"
_VECTOR = WarmUpRequest("/embedding", {"content": "Hello"}, "one embedding")
_DECISION = WarmUpRequest(
    "/v1/systemone",
    {"state": "Hello", "questions": {"greets": {"type": "noul", "instructions": "Is it a greeting?"}}},
    "one decision",
)
_SCORE = WarmUpRequest("/v1/rerank", {"query": "Hello", "documents": ["Hello"]}, "one score")


_REQUESTS = {ModelClass.ENCODER: _VECTOR, ModelClass.RERANKER: _SCORE, ModelClass.DECISION: _DECISION}


def warm_up_request(model_class: ModelClass) -> WarmUpRequest:
    """Return the request that a model of this class can answer."""
    return _REQUESTS.get(model_class, _TOKEN)


def begun_message_requests() -> tuple[WarmUpRequest, WarmUpRequest]:
    """Return two requests: how the chat template renders a begun message, and a stream that continues it.

    A stream may repeat less than an answer that is not one (xllamacpp 2026.10).
    """
    conversation = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": _BEGUN}]
    limits = {"stream": True, "max_tokens": 1, "temperature": 0.0, "cache_prompt": False}
    return (
        WarmUpRequest("/apply-template", {"messages": conversation}, "a prompt"),
        WarmUpRequest("/v1/chat/completions", {"messages": conversation, **limits}, "one token"),
    )


def repeats_begun_message(rendered: bytes, answer: bytes) -> bool | None:
    """Return whether llama-server repeats the begun message that it continues.

    Returns None if it does not continue the message.

    ``rendered`` and ``answer`` are the bodies of the answers to ``begun_message_requests``.
    """
    try:
        prompt = json.loads(rendered)["prompt"]
        events = [json.loads(event[6:]) for event in answer.split(b"\n\n") if event.startswith(b"data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        # Without continuation, the template closes the message and opens the next one.
        return text.startswith(_BEGUN) if choices and prompt.endswith(_BEGUN) else None
    except (*INVALID_JSON, LookupError, TypeError, AttributeError):
        return None


def slot_request(number: int) -> WarmUpRequest:
    """Request one token in this slot.

    llama-server uses slots first that were never used, even restored ones.
    """
    return WarmUpRequest(_TOKEN.path, {**_TOKEN.body, "id_slot": number}, _TOKEN.expects)


def response_problem(request: WarmUpRequest, status: int, body: bytes) -> str | None:
    """Return None if the answer shows that the model works, else the problem."""
    if not request.expects and status < 400:
        return None
    try:
        answer = json.loads(body)
    except INVALID_JSON:
        quoted = body[:80].decode(errors="replace")
        return f"{request.path} answered {status} with text that is not JSON: {quoted}"
    if status != 200:
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return f"{request.path} answered {status}: {message or body[:200].decode(errors='replace')}"
    if not _is_valid(request, answer):
        return f"{request.path} answered 200 without {request.expects}: {body[:200].decode(errors='replace')}"
    return None


def no_response(request: WarmUpRequest, error: Exception) -> str:
    """Return the problem for a request that failed with ``error``, whose text may be empty."""
    return f"{request.path} was not answered: {text_of(error)}"


def warmup_diagnosis(problem: str, tail: Sequence[str], *, status: int | None) -> Diagnosis:
    """Return the diagnosis of a failed warm-up. ``status``: that of the answer, if there was one."""
    if status == 401:
        # b11434 reads /etc/llama.cpp/config.ini whatever XDG_CONFIG_HOME is.
        return Diagnosis(
            cause="locked_out",
            message="llama-server requires an API key that llamasup did not set.",
            remedy="Remove api-key from /etc/llama.cpp/config.ini; `llamasup doctor` shows it.",
            lines=(),
            deterministic=True,
            exit_code=69,
        )
    if status == 404 and problem.startswith(_DECISION.path):
        return Diagnosis(
            cause="model_unsupported",
            message=f"This llama-server has no {_DECISION.path}, the endpoint that this model is for.",
            remedy="Use a newer llama-server (b11361 of October 2026, or later), or another model.",
            lines=(),
            deterministic=True,
            exit_code=65,
        )
    return Diagnosis(
        cause="warm_up_failed",
        message=f"llama-server reports that it is ready, but its first request failed: {problem}",
        remedy="See its log (llamasup logs). To serve without this check, use --no-warmup.",
        lines=tuple(trusted_head(tail)[-8:]),
        deterministic=False,
        exit_code=75,
    )


def _is_valid(request: WarmUpRequest, answer: Any) -> bool:
    try:
        match request.path:
            case "/embedding":
                # A list of results since late 2024, one result before (#10861).
                first = answer[0] if isinstance(answer, list) else answer
                return len(first["embedding"]) > 0
            case "/v1/rerank":
                return isinstance(answer["results"][0]["relevance_score"], float | int)
            case "/v1/systemone":
                return isinstance(answer["answers"]["greets"]["noul"], float | int)
            case _:
                return int(answer["tokens_predicted"]) > 0
    except (KeyError, IndexError, TypeError, ValueError):
        return False
