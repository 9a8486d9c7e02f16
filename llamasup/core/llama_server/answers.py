"""Declares what a llama-server answers, and reads what it says about itself: progress, tokens, slots,
context.

The declarations come first; other modules read answers of models with them. ``read_progress`` only reads;
``supervision/liveness.py`` decides what the numbers mean. Seen with b11434 and the embedded runtime
(xllamacpp 2026.10). Every field is optional where builds differ:

- ``is_processing`` is a number called ``state`` until September 2024 (0: idle);
- ``next_token`` is an object or a list of one;
- ``n_prompt_tokens_processed`` is missing until autumn 2025; it moves once per batch (2,048
  tokens by default), not per token (b11434), and so does ``llamacpp:n_decode_total``;
- builds before #27041 answer neither while a batch is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
from msgspec import Struct, field

from llamasup.core.system.text import INVALID_JSON

NULL: Final = msgspec.Raw(b"null")
Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]
"""A number of tokens."""


# --- declarations -----------------------------------------------------------------------------------


class ErrorObject(Struct):
    """An error of llama-server, or of llamasup, which has ``cause`` and ``remedy``.

    The counts of tokens are of a prompt that is longer than the context.
    """

    type: str = ""
    message: str = ""
    code: int | str | None = None
    cause: str | None = None
    remedy: str = ""
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class Failed(Struct):
    """The body of an error."""

    error: ErrorObject


class AnyError(Struct):
    """The body of an error, to be passed on as it is."""

    error: dict[str, Any]


class Timings(Struct):
    """The complete timings of llama-server (b11434), read at a third of the cost of the search."""

    cache_n: Count
    prompt_n: Count
    predicted_n: Count
    predicted_per_second: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]


class NextToken(Struct):
    n_decoded: Count = 0


class Slot(Struct):
    id: int = 0
    id_task: int = 0
    state: int = 0
    is_processing: bool | None = None
    n_prompt_tokens: Count | None = None
    n_prompt_tokens_processed: Count = 0
    n_prompt_tokens_cache: Count | None = None
    next_token: list[NextToken] | NextToken = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return self.state != 0 if self.is_processing is None else self.is_processing

    @property
    def decoded(self) -> int:
        tokens = self.next_token if isinstance(self.next_token, list) else [self.next_token]
        return sum(token.n_decoded for token in tokens)


class Window(Struct):
    n_ctx: int
    speculative: bool = False


class Tokens(Struct):
    """The answer of ``/tokenize``."""

    tokens: list[int]


class Pieces(Struct):
    """The answer of ``/tokenize`` with or without the pieces of text."""

    tokens: list[msgspec.Raw]


class Text(Struct):
    """The text of ``/completion`` and of ``/detokenize``."""

    content: str


class Function(Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(Struct):
    """A call of a tool, or a part of one in a stream."""

    index: int = 0
    id: str | None = None
    function: Function = field(default_factory=Function)


class Message(Struct):
    """The message of an answer, or a part of one. Its texts stay JSON, because they are copied."""

    content: msgspec.Raw = NULL
    reasoning_content: msgspec.Raw = NULL
    tool_calls: list[ToolCall] | None = None


class Alternative(Struct, omit_defaults=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChosenToken(Alternative, omit_defaults=True):
    top_logprobs: list[Alternative] | None = None


class Logprobs(Struct):
    content: list[ChosenToken] | None = None


class Choice(Struct):
    """A choice of a chat: ``delta`` in a stream, else ``message``."""

    delta: Message = field(default_factory=Message)
    message: Message = field(default_factory=Message)
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class ChatTimings(Struct):
    """The timings with the times of the prompt and of the answer."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


class ChatAnswer(Struct):
    """The answer of a chat, or one event of its stream."""

    choices: list[Choice] = []
    timings: ChatTimings | None = None
    error: msgspec.Raw = NULL


class CompletionAnswer(Struct):
    """The answer of ``/completion``, or one event of its stream."""

    content: msgspec.Raw = NULL
    stop: bool = False
    stop_type: str = ""
    timings: ChatTimings | None = None
    error: msgspec.Raw = NULL


class Embedding(Struct):
    embedding: msgspec.Raw
    index: int = 0


class Usage(Struct):
    prompt_tokens: int = 0


class Embeddings(Struct):
    """The answer of ``/v1/embeddings``."""

    data: list[Embedding]
    usage: Usage = field(default_factory=Usage)


class TextMessage(Struct):
    content: str | None = None
    tool_calls: list[Any] | None = None


class TextChoice(Struct):
    message: TextMessage | None = None
    text: str | None = None
    finish_reason: str | None = None


class TextAnswer(Struct):
    """The texts of a chat or of ``/v1/completions``; ``/completion`` has ``content`` and ``stop_type``."""

    choices: list[TextChoice] = []
    content: str | None = None
    stop_type: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it ended because of ``max_tokens`` or the end of the context."""
        return self.stop_type == "limit" or any(choice.finish_reason == "length" for choice in self.choices)

    def texts(self) -> Iterator[str]:
        """Return the texts that have to be JSON: all but tool calls."""
        if self.content is not None:
            yield self.content
        for choice in self.choices:
            message = choice.message
            if message is None:
                if choice.text is not None:
                    yield choice.text
            elif not message.tool_calls or (message.content or "").strip():  # a call has an empty text
                yield message.content or ""


class ListedToken(Struct):
    id: int
    logprob: float | None = None


class ProbableToken(Struct):
    id: int
    top_logprobs: list[ListedToken] = field(default_factory=list)


class Probabilities(Struct):
    """The answer of ``/completion`` with ``n_probs``; builds before 2025 have no list."""

    completion_probabilities: list[ProbableToken] = field(default_factory=list)


# --- readers ----------------------------------------------------------------------------------------


class ContextWindow(Struct, frozen=True):
    """The context of one request. Prompt and answer of ``full_from`` tokens together may have been cut."""

    n_ctx: int
    full_from: int


class NoAnswer(Exception):
    """The server gave no answer. The text says why."""


class Health(Enum):
    """The result of ``/health``."""

    OK = "ok"
    LOADING = "loading"
    SILENT = "silent"  # no connection, or no valid answer in time


class TokenProbe(Struct, frozen=True):
    """The result of a request for one token. ``problem``: why it failed; None if it did not."""

    problem: str | None


class SlotAnswer(Struct, frozen=True):
    """The answer to ``/slots/N?action=…``. ``problem``: why it failed; empty if it did not."""

    tokens: int = 0
    problem: str = ""


def read_slot_answer(status: int, body: bytes, counted: str) -> SlotAnswer:
    """Read the answer to ``/slots/N?action=…``.

    ``counted``: ``n_saved`` or ``n_restored``, the field with the number of tokens.
    """
    try:
        answer = json.loads(body)
        if status == 200:
            return SlotAnswer(tokens=int(answer[counted]))
        return SlotAnswer(problem=str(answer["error"]["message"]))
    except (KeyError, TypeError, *INVALID_JSON):
        return SlotAnswer(problem=f"it answered {status}: {body[:200].decode(errors='replace')}")


_TOTAL = re.compile(rb"^llamacpp:\w+_total(?:\{[^}]*\})? +(\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE)
_NOTHING: Mapping[str, int] = MappingProxyType({})
# The longest draft by default is 48 tokens (ngram-simple, b11434); 3 with a draft model.
_LONGEST_DRAFT = 48


class ServerProgress(Struct, frozen=True):
    """The progress of all requests.

    ``tokens``: the prompt and answer tokens so far of each request in a slot, by slot and task.

    ``prefilling``: whether a request is still at its prompt (None: unknown). ``total``: the sum of the
    server's counters, which only grow.
    """

    tokens: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    prefilling: bool | None = None
    total: float | None = None


class SlotProgress(Struct, frozen=True):
    """A busy slot. ``prompt``: the tokens of its prompt, of which ``done`` are in the context.

    None: this build does not say. ``decoded``: the tokens of its answer so far.
    """

    task: int
    prompt: int | None
    done: int | None
    decoded: int


def read_progress(slots: bytes | None, metrics: bytes | None) -> ServerProgress:
    """Read the bodies of ``/slots`` and ``/metrics``, which may be None or invalid."""
    tokens: Mapping[str, int] = _NOTHING
    prefilling: bool | None = None
    busy = _busy_slots(slots)
    if busy is not None:
        tokens = {f"{slot.id}/{slot.id_task}": slot.n_prompt_tokens_processed + slot.decoded for slot in busy}
        prefilling = any(slot.decoded == 0 for slot in busy)
    totals = _TOTAL.findall(metrics or b"")
    return ServerProgress(tokens, prefilling, sum(map(float, totals)) if totals else None)


def read_slots(slots: bytes | None) -> tuple[SlotProgress, ...] | None:
    """Return the busy slots, in the order in which they got their requests; None: no valid answer."""
    busy = _busy_slots(slots)
    if busy is None:
        return None
    return tuple(map(_progress, sorted(busy, key=lambda slot: slot.id_task)))


def _busy_slots(slots: bytes | None) -> list[Slot] | None:
    try:
        return [slot for slot in msgspec.json.decode(slots or b"", type=list[Slot]) if slot.is_busy]
    except (msgspec.DecodeError, RecursionError):  # RecursionError: deeply nested brackets
        return None


def _progress(slot: Slot) -> SlotProgress:
    if slot.n_prompt_tokens is None or slot.n_prompt_tokens_cache is None:
        return SlotProgress(slot.id_task, None, None, slot.decoded)
    # b11434 also counts the tokens of the answer in ``n_prompt_tokens``.
    prompt = max(0, slot.n_prompt_tokens - slot.decoded)
    done = min(prompt, slot.n_prompt_tokens_cache + slot.n_prompt_tokens_processed)
    return SlotProgress(slot.id_task, prompt, done, slot.decoded)


def read_window(slots: bytes | None) -> ContextWindow | None:
    """Return the window from an answer of ``/slots``; None if it has none."""
    try:
        slot = msgspec.json.decode(slots or b"", type=list[Window])[0]
    except (msgspec.DecodeError, RecursionError, IndexError):
        return None
    if slot.n_ctx < 1:
        return None
    return ContextWindow(slot.n_ctx, slot.n_ctx - _LONGEST_DRAFT * slot.speculative)


def read_token_count(body: bytes) -> int | None:
    """Return the number of tokens in an answer of ``/tokenize``; None if it has none."""
    try:
        return len(msgspec.json.decode(body, type=Pieces).tokens)
    except msgspec.MsgspecError:
        return None


def error_of(status: int, body: bytes) -> bytes:
    """Return llama-server's own error as an error body of one line, for a stream that got an error.

    If ``body`` is not an error, the message names ``status``.
    """
    try:
        error = msgspec.json.decode(body, type=AnyError).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        message = f"llama-server answered with status {status} instead of a stream"
        error = {"message": message, "type": "server_error", "code": status}
    return msgspec.json.encode({"error": error})
