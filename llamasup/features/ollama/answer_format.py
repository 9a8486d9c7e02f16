"""Translates the answers of llama-server into answers of Ollama's API (pure).

The answers of llama-server are as in build b11434. Text is copied without decoding it, because this runs for
each token.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from llamasup.core.llama_server.answers import (
    NULL,
    ChatAnswer,
    ChatTimings,
    Choice,
    ChosenToken,
    CompletionAnswer,
    Embeddings,
    Failed,
    ToolCall,
)
from llamasup.core.system.text import INVALID_JSON, path_text
from llamasup.features.ollama.requests import Kind, OllamaRequest

_EMPTY: Final = b'""'
_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000

_encode = msgspec.json.Encoder().encode


class BrokenAnswer(Exception):
    """The answer of llama-server has no form in Ollama's API. The text says why."""


class Times(msgspec.Struct, frozen=True):
    """The times of one request, in seconds. ``load_s`` is how long it waited for the load of its model."""

    total_s: float
    load_s: float = 0.0


_read_chat = msgspec.json.Decoder(ChatAnswer).decode
_read_completion = msgspec.json.Decoder(CompletionAnswer).decode
_read_embeddings = msgspec.json.Decoder(Embeddings).decode
_read_failed = msgspec.json.Decoder(Failed).decode
_read_numbers = msgspec.json.Decoder(list[float]).decode

# --- errors ----------------------------------------------------------------------------------------

# llama-server answers 500 or 501, but the request is the reason (b11434).
_OF_THE_REQUEST: Final = (
    "image input is not supported",
    "audio input is not supported",
    "is too large to process",
    "does not support embeddings",
    "Failed to load image",
)


def error_text(body: bytes) -> str:
    """Return the sentence in an error object of llamasup or of llama-server."""
    try:
        error = _read_failed(body).error
    except INVALID_JSON:
        return "llama-server failed"
    sentence = error.message or error.type or "llama-server failed"
    if not error.remedy:
        return sentence
    return f"{sentence.removesuffix('.')}. {error.remedy}"


def status_of_error(status: int, sentence: str) -> int:
    """Return the status of an error with this sentence, which llama-server gave ``status``."""
    return 400 if status >= 500 and any(text in sentence for text in _OF_THE_REQUEST) else status


def error_line(sentence: str) -> bytes:
    """Write an error object of Ollama, which also ends a stream that breaks off."""
    return _encode({"error": path_text(sentence)}) + b"\n"


# --- tool calls ------------------------------------------------------------------------------------


class _Call(msgspec.Struct):
    """A tool call, of which a stream brings pieces."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class _Calls:
    def __init__(self) -> None:
        self._by_index: dict[int, _Call] = {}

    def add(self, pieces: list[ToolCall]) -> None:
        for piece in pieces:
            call = self._by_index.setdefault(piece.index, _Call())
            call.id = piece.id or call.id
            call.name += piece.function.name or ""
            call.arguments += piece.function.arguments or ""

    def encoded(self, *, is_cut: bool) -> bytes:
        """Write the ``tool_calls`` of a message; empty if there are none. Raises BrokenAnswer.

        ``is_cut``: the answer ended at its limit, maybe within the last call, which is then left out.
        """
        found: list[dict[str, Any]] = []
        last = max(self._by_index, default=0)
        for at, call in sorted(self._by_index.items()):
            may_be_cut = is_cut and at == last
            arguments = _object(call.arguments or ("" if may_be_cut else "{}"))
            if arguments is None and may_be_cut:
                break
            if arguments is None:
                raise BrokenAnswer(
                    f"the arguments of the model's call of the tool {call.name[:80]!r} are not a JSON object"
                )
            function = {"index": at, "name": call.name, "arguments": arguments}
            found.append({**({"id": call.id} if call.id else {}), "function": function})
        return _encode(found) if found else b""


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(arguments)
    except INVALID_JSON:
        return None
    return found if isinstance(found, dict) else None


# --- parts of answers ------------------------------------------------------------------------------

_REASONS: Final = {"length": "length", "limit": "length"}


def _reason(finish_reason: str | None) -> str:
    return _REASONS.get(finish_reason or "", "stop")


def _metrics(times: Times, timings: ChatTimings | None) -> bytes:
    """The end of the last object: numbers of tokens, and times in nanoseconds."""
    found = timings or ChatTimings()
    return (
        b'"total_duration":%d,"load_duration":%d,"prompt_eval_count":%d,"prompt_eval_duration":%d,'
        b'"eval_count":%d,"eval_duration":%d}\n'
        % (
            times.total_s * _NS_PER_S,
            times.load_s * _NS_PER_S,
            found.cache_n + found.prompt_n,
            found.prompt_ms * _NS_PER_MS,
            found.predicted_n,
            found.predicted_ms * _NS_PER_MS,
        )
    )


def _tokens(tokens: list[ChosenToken], *, alternatives: bool) -> bytes:
    """The field ``logprobs``, with its comma; empty without tokens."""
    if not tokens:
        return b""
    if not alternatives:
        for token in tokens:
            token.top_logprobs = None
    return b'"logprobs":' + _encode(tokens) + b","


def _of(value: msgspec.Raw) -> bytes:
    """A JSON string, still encoded; empty if it has no text."""
    found = bytes(value)
    return b"" if found in (b"null", _EMPTY) else found


def _chat_message(content: bytes, thinking: bytes, calls: bytes = b"") -> bytes:
    return b'"message":{"role":"assistant","content":%b%b%b},' % (
        content or _EMPTY,
        b',"thinking":' + thinking if thinking else b"",
        b',"tool_calls":' + calls if calls else b"",
    )


def _response(content: bytes, thinking: bytes, calls: bytes = b"") -> bytes:
    """``calls``: /api/generate has no tools, so a template cannot make the model call one."""
    return b'"response":%b,%b' % (content or _EMPTY, b'"thinking":%b,' % thinking if thinking else b"")


def _begin(model: str) -> bytes:
    return b'{"model":%b,"created_at":"' % _encode(model)


# --- streams ---------------------------------------------------------------------------------------


class Lines:
    """Makes the lines of one stream.

    The times of the last line are those when it is made: ``last`` gets them.
    """

    def __init__(self, request: OllamaRequest) -> None:
        self._begin = _begin(request.name)
        self._is_chat = request.kind is not Kind.RAW
        self._part = _chat_message if request.kind is Kind.CHAT else _response
        self._alternatives = request.alternatives
        self._calls = _Calls()
        self._reason = _reason(None)
        self._timings: ChatTimings | None = None
        self._tokens: list[ChosenToken] = []  # that have no line yet
        self.ends = False
        """llama-server has sent its last event."""

    def add(self, event: bytes, created_at: bytes) -> bytes:
        """Write the line for an event, without its ``data: ``; empty if Ollama has none. Raises
        BrokenAnswer.
        """
        if event == b"[DONE]":
            self.ends = True
            return b""
        try:
            return self._chat(event, created_at) if self._is_chat else self._completion(event, created_at)
        except INVALID_JSON as error:
            raise BrokenAnswer("llama-server sent an event that is not the JSON of its API") from error

    def _chat(self, event: bytes, created_at: bytes) -> bytes:
        chunk = _read_chat(event)
        if chunk.error is not NULL:
            raise BrokenAnswer(error_text(event))
        if chunk.timings is not None:
            self._timings = chunk.timings
        if not chunk.choices:
            return b""
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self._reason = _reason(choice.finish_reason)
        delta = choice.delta
        if delta.tool_calls:
            self._calls.add(delta.tool_calls)
        if choice.logprobs is not None:
            self._tokens += choice.logprobs.content or ()
        content, thinking = _of(delta.content), _of(delta.reasoning_content)
        if not content and not thinking:
            return b""
        tokens = self._take_tokens() if self._tokens else b""
        return b'%b%b",%b%b"done":false}\n' % (self._begin, created_at, self._part(content, thinking), tokens)

    def _take_tokens(self) -> bytes:
        """The logprobs since the last line: an event without a text, such as a part of a letter, has some."""
        tokens, self._tokens = self._tokens, []
        return _tokens(tokens, alternatives=self._alternatives)

    def _completion(self, event: bytes, created_at: bytes) -> bytes:
        chunk = _read_completion(event)
        if chunk.error is not NULL:
            raise BrokenAnswer(error_text(event))
        if chunk.stop:
            self._timings, self._reason = chunk.timings, _reason(chunk.stop_type)
            self.ends = True
        if not (content := _of(chunk.content)):
            return b""
        return b'%b%b",%b"done":false}\n' % (self._begin, created_at, self._part(content, b""))

    def last(self, created_at: bytes, times: Times) -> bytes:
        """Write the last lines, once llama-server's answer is complete. Raises BrokenAnswer."""
        if not self.ends:
            raise BrokenAnswer("the answer of llama-server broke off")
        calls = self._calls.encoded(is_cut=self._reason == "length")
        found, tokens = b"", self._take_tokens()
        if calls:
            found = b'%b%b",%b"done":false}\n' % (self._begin, created_at, self._part(b"", b"", calls))
        return found + b'%b%b",%b%b"done":true,"done_reason":"%b",%b' % (
            self._begin,
            created_at,
            self._part(b"", b""),
            tokens,
            self._reason.encode(),
            _metrics(times, self._timings),
        )


# --- whole answers ---------------------------------------------------------------------------------


def whole(request: OllamaRequest, body: bytes, created_at: bytes, times: Times) -> bytes:
    """Write the answer for a complete body with status 200. Raises BrokenAnswer."""
    if request.loads:
        return loaded(request, created_at)
    try:
        if request.kind in (Kind.EMBED, Kind.EMBEDDINGS):
            return _whole_embeddings(request, body, times)
        part, timings = _whole_text(request, body)
    except INVALID_JSON as error:
        raise BrokenAnswer("llama-server sent an answer that is not the JSON of its API") from error
    return b'%b%b",%b%b' % (_begin(request.name), created_at, part, _metrics(times, timings))


def _whole_text(request: OllamaRequest, body: bytes) -> tuple[bytes, ChatTimings | None]:
    if request.kind is Kind.RAW:
        completion = _read_completion(body)
        part = _response(_of(completion.content), b"")
        end = _reason(completion.stop_type).encode()
        return b'%b"done":true,"done_reason":"%b",' % (part, end), completion.timings
    chat = _read_chat(body)
    choice = chat.choices[0] if chat.choices else Choice()
    message, calls = choice.message, _Calls()
    calls.add([msgspec.structs.replace(call, index=at) for at, call in enumerate(message.tool_calls or ())])
    form, reason = _chat_message if request.kind is Kind.CHAT else _response, _reason(choice.finish_reason)
    called = calls.encoded(is_cut=reason == "length")
    part = form(_of(message.content), _of(message.reasoning_content), called)
    found = [] if choice.logprobs is None else choice.logprobs.content or []
    tokens = _tokens(found, alternatives=request.alternatives)
    return b'%b%b"done":true,"done_reason":"%b",' % (part, tokens, reason.encode()), chat.timings


def _whole_embeddings(request: OllamaRequest, body: bytes, times: Times) -> bytes:
    found = _read_embeddings(body)
    if not found.data:
        raise BrokenAnswer("llama-server sent no embedding")
    vectors = [bytes(each.embedding) for each in sorted(found.data, key=lambda each: each.index)]
    if request.kind is Kind.EMBEDDINGS:
        return b'{"embedding":%b}\n' % vectors[0]
    if request.dimensions is not None:
        vectors = [_shortened(vector, request.dimensions) for vector in vectors]
    return (
        b'{"model":%b,"embeddings":[%b],"total_duration":%d,"load_duration":%d,"prompt_eval_count":%d}\n'
        % (
            _encode(request.name),
            b",".join(vectors),
            times.total_s * _NS_PER_S,
            times.load_s * _NS_PER_S,
            found.usage.prompt_tokens,
        )
    )


def _shortened(vector: bytes, dimensions: int) -> bytes:
    """The first numbers, normalized again, as Ollama does. llama-server ignores ``dimensions``."""
    numbers = _read_numbers(vector)
    if len(numbers) <= dimensions:
        return vector
    numbers = numbers[:dimensions]
    length = math.sqrt(sum(each * each for each in numbers)) or 1.0
    return _encode([each / length for each in numbers])


def loaded(request: OllamaRequest, created_at: bytes, *, reason: str = "load") -> bytes:
    """Write the answer to a request without a prompt."""
    begin = b'%b%b",' % (_begin(request.name), created_at)
    end = b'"done":true,"done_reason":%b}\n' % _encode(reason)
    match request.kind:
        case Kind.CHAT:
            return begin + _chat_message(b"", b"") + end
        case Kind.GENERATE:
            return begin + _response(b"", b"") + end
        case Kind.EMBED:
            return b'{"model":%b,"embeddings":[]}\n' % _encode(request.name)
        case _:
            return b'{"embedding":[]}\n'


MAX_EVENT: Final = 4 << 20
"""Bytes of an event; those of llama-server (b11434) have some KiB, with 20 alternatives for a token."""

EVENT: Final = b"data: "


class Events:
    """Holds the beginning of an event until its rest arrives."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def complete(self, data: bytes) -> bytes:
        """Return the events that are complete now. Raises BrokenAnswer."""
        rest = self._rest
        if not rest and data.endswith(b"\n\n"):
            return data
        searched = max(0, len(rest) - 1)
        rest += data
        end = rest.rfind(b"\n\n", searched) + 2
        if end == 1:  # not found
            if len(rest) > MAX_EVENT:
                raise BrokenAnswer(f"llama-server sent an event of more than {MAX_EVENT} bytes")
            return b""
        complete = bytes(rest[:end])
        del rest[:end]
        return complete
