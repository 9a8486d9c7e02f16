"""What proves that a model of a class really works: the smallest request, and what its answer must hold.

``/health`` says 200 as soon as the weights are loaded; the first decode is where an out-of-memory GPU or a
missing kernel shows (llama.cpp #13085). One real token finds it before a user does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamasup.gguf.facts import ModelClass
from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.last_words import own_lines
from llamasup.system.text import INVALID_JSON

__all__ = [
    "WarmUpRequest",
    "explain_failure",
    "not_answered",
    "use_of_slot",
    "warm_up_request",
    "what_is_missing",
]


@dataclass(frozen=True, slots=True)
class WarmUpRequest:
    path: str
    body: Mapping[str, Any]
    proves: str
    """What a good answer holds, for people."""


_TOKEN = WarmUpRequest(
    "/completion",
    # cache_prompt off: the warm-up must not leave its prompt in a slot's cache.
    {"prompt": "Hello", "n_predict": 1, "temperature": 0.0, "cache_prompt": False},
    "one token",
)
_VECTOR = WarmUpRequest("/embedding", {"content": "Hello"}, "one embedding")
_SCORE = WarmUpRequest("/v1/rerank", {"query": "Hello", "documents": ["Hello"]}, "one score")


def warm_up_request(model_class: ModelClass) -> WarmUpRequest:
    """The request that a model of this class can answer."""
    match model_class:
        case ModelClass.ENCODER:
            return _VECTOR
        case ModelClass.RERANKER:
            return _SCORE
        case _:
            return _TOKEN


def use_of_slot(number: int) -> WarmUpRequest:
    """One token in this very slot. Slots that were never used are given away first, whatever they hold."""
    return WarmUpRequest(_TOKEN.path, {**_TOKEN.body, "id_slot": number}, _TOKEN.proves)


def what_is_missing(request: WarmUpRequest, status: int, body: bytes) -> str | None:
    """None if the answer proves that the model works, else a sentence saying why it does not."""
    try:
        answer = json.loads(body)
    except INVALID_JSON:
        quoted = body[:80].decode(errors="replace")
        return f"{request.path} answered {status} with something that is not JSON: {quoted}"
    if status != 200:
        error = answer.get("error") if isinstance(answer, dict) else None
        said = error.get("message") if isinstance(error, dict) else None
        return f"{request.path} answered {status}: {said or body[:200].decode(errors='replace')}"
    if not _holds_proof(request, answer):
        return f"{request.path} answered 200 without {request.proves}: {body[:200].decode(errors='replace')}"
    return None


def not_answered(request: WarmUpRequest, error: Exception) -> str:
    """The same for a request that ended in ``error``: some have no words of their own."""
    return f"{request.path} was not answered: {str(error) or type(error).__name__}"


def explain_failure(missing: str, tail: Sequence[str], *, status: int | None) -> Diagnosis:
    """A server that says it is ready and gives no proof. ``status`` is that of its answer, if it gave one."""
    if status == 401:
        # Whatever XDG_CONFIG_HOME says, b11434 reads /etc/llama.cpp/config.ini.
        return Diagnosis(
            cause="locked_out",
            message="llama-server asks for an API key that llamasup did not set",
            remedy="Take api-key out of /etc/llama.cpp/config.ini; `llamasup doctor` shows what it sets.",
            lines=(),
            deterministic=True,
            exit_code=69,
        )
    return Diagnosis(
        cause="warm_up_failed",
        message=f"llama-server says that it is ready, but {missing}",
        remedy="See its log. To serve without this proof, use --no-warmup.",
        lines=tuple(own_lines(tail)[-8:]),
        deterministic=False,
        exit_code=75,
    )


def _holds_proof(request: WarmUpRequest, answer: Any) -> bool:
    try:
        match request.path:
            case "/embedding":
                # A list of results since late 2024, one result before (#10861).
                first = answer[0] if isinstance(answer, list) else answer
                return len(first["embedding"]) > 0
            case "/v1/rerank":
                return isinstance(answer["results"][0]["relevance_score"], float | int)
            case _:
                return int(answer["tokens_predicted"]) > 0
    except (KeyError, IndexError, TypeError, ValueError):
        return False
