"""The forms of a streamed answer: how each is read, continued, and joined to its beginning (pure).

What llama-server does (b11434; docs/continuation.md): if the last message is one of the assistant, it
continues its text, and the first event with text has all of it and the first new token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from llamasup.features.continuation.answer import Event, NotContinued, Prefix, Sent
from llamasup.features.continuation.request import Body, limited, messages_of, raw, value

_COMPLETE: Final = "the answer was complete but for its end"
_TOOL_CALL: Final = "a tool call has begun"


class Joint(Protocol):
    """Turns the events of the new stream into those that continue the first one.

    ``prefixes``: what the client has, if it is the begun message that the new server must continue.
    """

    prefixes: tuple[Prefix, ...]

    def joined(self, event: Event) -> Event | None:
        """The event for the client; None: it has this already. Raises NotContinued."""


class Api(Protocol):
    """One form of stream."""

    def sent(self, events: Iterable[Event]) -> Sent:
        """Read what the client has. Raises NotContinued."""

    def continued(self, body: Body, sent: Sent) -> Joint:
        """Change the request so that it continues what the client has. Raises NotContinued."""

    def is_last(self, event: Event) -> bool:
        """Whether this event ends the answer."""


# --- /v1/chat/completions


class _Chat:
    def sent(self, events: Iterable[Event]) -> Sent:
        sent = Sent()
        for event in events:
            for choice in _choices(event):
                delta = _object(choice, "delta")
                if delta.get("tool_calls") or delta.get("function_call"):
                    raise NotContinued(_TOOL_CALL)
                _refuse_end(choice)
                sent.opening.setdefault("chunk", event.data)
                _note(sent, event.data, delta.get("content"), delta.get("reasoning_content"))
        return sent

    def is_last(self, event: Event) -> bool:
        return bool(event.data == "[DONE]")

    def continued(self, body: Body, sent: Sent) -> Joint:
        messages, role = messages_of(body, "messages")
        if not sent.is_empty:
            if sent.reasoning and not sent.text:
                raise NotContinued("the answer was still in its reasoning, which templates close")
            message = {"role": "assistant", "content": sent.text}
            if sent.reasoning:
                message["reasoning_content"] = sent.reasoning
            # If the client itself began the answer, the stream has repeated that.
            begun = messages[:-1] if role == "assistant" else messages
            body["messages"] = raw([*begun, message])
        return _ChatJoint(sent, is_full=limited(body, sent.pieces))


class _ChatJoint:
    def __init__(self, sent: Sent, *, is_full: bool) -> None:
        self._identity = _identity(sent.opening.get("chunk"))
        self._has_begun = bool(sent.opening)
        self._pieces, self._is_full = sent.pieces, is_full
        self._text, self._reasoning = Prefix(sent.text), Prefix(sent.reasoning)
        self.prefixes: tuple[Prefix, ...] = (self._text, self._reasoning)

    def joined(self, event: Event) -> Event | None:
        if not isinstance(event.data, dict):
            return event
        chunk = {**event.data, **self._identity}
        choices = _choices(event)
        # The client has seen the progress of its prompt; but the event may repeat the begun text.
        if self._has_begun and chunk.pop("prompt_progress", None) is not None and not choices:
            return None
        for choice in choices:
            delta = _object(choice, "delta")
            if delta.get("tool_calls") and self._is_full:
                return None
            is_news = bool(choice.get("finish_reason") or delta.get("tool_calls"))
            if self._has_begun and delta.pop("role", None) and delta.get("content") is None:
                delta.pop("content", None)
            for name, prefix in (("content", self._text), ("reasoning_content", self._reasoning)):
                if isinstance(text := delta.get(name), str):
                    delta[name] = "" if self._is_full else prefix.beyond(text)
                    is_news = is_news or bool(delta[name])
            if self._is_full and choice.get("finish_reason"):
                choice["finish_reason"] = "length"
            if not is_news and self._has_begun:
                return None
        _count_all(chunk, "prompt_tokens", "completion_tokens", self._pieces, is_full=self._is_full)
        return Event(event.name, chunk)


# --- /v1/completions and /completion


class _TextCompletions(_Chat):
    def sent(self, events: Iterable[Event]) -> Sent:
        sent = Sent()
        for event in events:
            for choice in _choices(event):
                _refuse_end(choice)
                sent.opening.setdefault("chunk", event.data)
                _note(sent, event.data, choice.get("text"))
        return sent

    def continued(self, body: Body, sent: Sent) -> Joint:
        _continue_prompt(body, sent)
        return _TextJoint(sent, is_full=limited(body, sent.pieces))


class _TextJoint:
    prefixes: tuple[Prefix, ...] = ()

    def __init__(self, sent: Sent, *, is_full: bool) -> None:
        self._identity = _identity(sent.opening.get("chunk"))
        self._pieces, self._is_full = sent.pieces, is_full

    def joined(self, event: Event) -> Event | None:
        if not isinstance(event.data, dict):
            return event
        if self._identity and "prompt_progress" in event.data:
            return None
        chunk = {**event.data, **self._identity}
        for choice in _choices(event):
            if self._is_full:
                if not choice.get("finish_reason"):
                    return None
                choice.update(text="", finish_reason="length")
        _count_all(chunk, "prompt_tokens", "completion_tokens", self._pieces, is_full=self._is_full)
        return Event(event.name, chunk)


class _Completion:
    """llama-server's own: the tokens are in the stream."""

    def sent(self, events: Iterable[Event]) -> Sent:
        sent = Sent()
        tokens: list[int] = []
        has_all = True
        for event in events:
            data = _data(event)
            if data.get("stop"):
                raise NotContinued(_COMPLETE)
            if "content" not in data:
                continue  # the progress of the prompt
            sent.opening.setdefault("chunk", data)
            tokens += data.get("tokens") or []
            # The first tokens of a character of several ones are in no event.
            has_all = has_all and data.get("tokens_predicted") == len(tokens)
            if data["content"]:  # else the text is held back, perhaps as a stop string: it is generated again
                _note(sent, data, data["content"])
                sent.tokens = [*tokens]
                sent.pieces = data.get("tokens_predicted", sent.pieces)
                sent.is_counted = "tokens_predicted" in data
        if not has_all:
            sent.tokens = []
        return sent

    def is_last(self, event: Event) -> bool:
        return bool(_data(event).get("stop"))

    def continued(self, body: Body, sent: Sent) -> Joint:
        _continue_prompt(body, sent)
        limit = value(body, "n_predict" if "n_predict" in body else "max_tokens")
        return _CompletionJoint(sent, limit, is_full=limited(body, sent.pieces))


class _CompletionJoint:
    prefixes: tuple[Prefix, ...] = ()

    def __init__(self, sent: Sent, limit: int | None, *, is_full: bool) -> None:
        self._sent, self._limit, self._is_full = sent, limit, is_full

    def joined(self, event: Event) -> Event | None:
        data = dict(_data(event))
        if not self._sent.is_empty and "content" not in data:
            return None  # the progress of the prompt
        if self._is_full:
            if not data.get("stop"):
                return None
            data.update(content="", tokens=[], stop_type="limit", stopping_word="")
        if "tokens_predicted" in data:
            own = 0 if self._is_full else data["tokens_predicted"]
            data["tokens_predicted"] = own + self._sent.pieces
        if "tokens_evaluated" in data:
            first = self._sent.opening.get("chunk", {})
            data["tokens_evaluated"] = first.get("tokens_evaluated", data["tokens_evaluated"])
        if data.get("stop"):
            self._join_end(data)
        _join_timings(data, self._sent.pieces, is_full=self._is_full)
        return Event(event.name, data)

    def _join_end(self, data: dict[str, Any]) -> None:
        text = self._sent.text
        if isinstance(prompt := data.get("prompt"), str):
            data["prompt"] = prompt.removesuffix(text)
        if "has_new_line" in data:
            data["has_new_line"] = data["has_new_line"] or "\n" in text
        settings = data.get("generation_settings")
        if isinstance(settings, dict) and self._limit is not None:
            data["generation_settings"] = {**settings, "n_predict": self._limit, "max_tokens": self._limit}


# --- /v1/messages


class _Messages:
    def sent(self, events: Iterable[Event]) -> Sent:
        sent = Sent()
        for event in events:
            data = _data(event)
            kind = data.get("type")
            if kind in ("message_start", "content_block_start"):
                sent.opening[kind] = data
                block = data.get("content_block")
                if isinstance(block, dict) and block.get("type") not in ("text", "thinking"):
                    raise NotContinued(_TOOL_CALL)
            elif kind == "content_block_delta":
                delta = _object(data, "delta")
                _note(sent, data, delta.get("text"), delta.get("thinking"))
            elif kind in ("message_delta", "message_stop") or (kind == "content_block_stop" and sent.text):
                raise NotContinued(_COMPLETE)
        return sent

    def is_last(self, event: Event) -> bool:
        return event.name == "message_stop"

    def continued(self, body: Body, sent: Sent) -> Joint:
        messages, role = messages_of(body, "messages")
        if sent.reasoning:
            raise NotContinued("the answer has thinking blocks")
        if not sent.is_empty:
            begun = messages[:-1] if role == "assistant" else messages
            body["messages"] = raw([*begun, {"role": "assistant", "content": sent.text}])
        return _MessagesJoint(sent, is_full=limited(body, sent.pieces))


class _MessagesJoint:
    def __init__(self, sent: Sent, *, is_full: bool) -> None:
        self._opening, self._pieces, self._is_full = sent.opening, sent.pieces, is_full
        self._text = Prefix(sent.text)
        self.prefixes: tuple[Prefix, ...] = (self._text,)

    def joined(self, event: Event) -> Event | None:
        data = dict(_data(event))
        kind = data.get("type")
        if kind in ("message_start", "content_block_start") and (known := self._opening.pop(kind, None)):
            if _object(data, "content_block").get("type") != _object(known, "content_block").get("type"):
                raise NotContinued("the rest of the answer begins with another kind of content")
            return None
        delta = _object(data, "delta")
        if kind == "content_block_delta" and isinstance(text := delta.get("text"), str):
            delta["text"] = "" if self._is_full else self._text.beyond(text)
            if not delta["text"]:
                return None
        if kind == "message_delta":
            usage = _object(data, "usage")
            own = 0 if self._is_full else usage.get("output_tokens", 0)
            usage["output_tokens"] = own + self._pieces
            if self._is_full:
                delta.update(stop_reason="max_tokens", stop_sequence=None)
        return Event(event.name, data)


# --- /v1/responses


class _Responses:
    def sent(self, events: Iterable[Event]) -> Sent:
        sent = Sent()
        for event in events:
            data = _data(event)
            match data.get("type"):
                case "response.output_text.delta":
                    _note(sent, data, data.get("delta"))
                case "response.created" | "response.in_progress" | "response.content_part.added":
                    sent.opening[data["type"]] = data
                case "response.output_item.added":
                    if _object(data, "item").get("type") != "message":
                        raise NotContinued("the answer has more than text")
                    sent.opening[data["type"]] = data
                case "response.output_text.done" | "response.content_part.done" | "response.output_item.done":
                    raise NotContinued(_COMPLETE)
                case _:
                    raise NotContinued("the answer has more than text")
        return sent

    def is_last(self, event: Event) -> bool:
        return event.name == "response.completed"

    def continued(self, body: Body, sent: Sent) -> Joint:
        if not sent.is_empty:
            if isinstance(text := value(body, "input"), str):
                body["input"] = raw([{"role": "user", "content": text}])
            items, _role = messages_of(body, "input")
            part = {"type": "output_text", "text": sent.text}
            begun = {"type": "message", "role": "assistant", "status": "in_progress", "content": [part]}
            body["input"] = raw([*items, begun])
        return _ResponsesJoint(sent, is_full=limited(body, sent.pieces))


class _ResponsesJoint:
    def __init__(self, sent: Sent, *, is_full: bool) -> None:
        self._opening, self._pieces = sent.opening, sent.pieces
        self._response = _object(sent.opening.get("response.created", {}), "response").get("id")
        self._item = _object(sent.opening.get("response.output_item.added", {}), "item").get("id")
        self._sent, self._is_full = sent.text, is_full
        self._text = Prefix(sent.text)
        self.prefixes: tuple[Prefix, ...] = (self._text,)

    def joined(self, event: Event) -> Event | None:
        data = dict(_data(event))
        kind = data.get("type")
        if kind in self._opening:
            del self._opening[kind]
            return None
        if kind == "response.output_text.delta" and isinstance(delta := data.get("delta"), str):
            data["delta"] = "" if self._is_full else self._text.beyond(delta)
            if not data["delta"]:
                return None
        if (
            self._response is not None
            and data.pop("prompt_progress", None) is not None
            and "delta" not in data
        ):
            return None
        response = _object(data, "response")
        items = [_object(data, "item"), *_objects(response.get("output"))]
        messages = [item for item in items if item.get("type") == "message"]
        if self._item is not None:
            if "item_id" in data:
                data["item_id"] = self._item
            for item in messages:
                item["id"] = self._item
        if self._is_full:  # without the one more token
            for part in (data, _object(data, "part"), *_parts(messages)):
                if "text" in part:
                    part["text"] = self._sent
        if self._response is not None and response:
            response["id"] = self._response
        _count_all(response, "input_tokens", "output_tokens", self._pieces, is_full=self._is_full)
        _join_timings(data, self._pieces, is_full=self._is_full)
        return Event(event.name, data)


API_BY_ROUTE: Final[dict[str, Api]] = {
    "/completion": _Completion(),
    "/v1/completions": _TextCompletions(),
    "/v1/chat/completions": _Chat(),
    "/v1/messages": _Messages(),
    "/v1/responses": _Responses(),
}
"""By the label of the route."""


# --- parts of several


def _data(event: Event) -> dict[str, Any]:
    if not isinstance(event.data, dict):
        raise NotContinued("an event of the stream is not an object")
    if "error" in event.data:
        raise NotContinued("the stream has an error")
    return event.data


def _object(owner: Any, name: str) -> dict[str, Any]:
    """The member, if it is an object; otherwise an empty one."""
    member = owner.get(name) if isinstance(owner, dict) else None
    return member if isinstance(member, dict) else {}


def _objects(members: Any) -> list[dict[str, Any]]:
    return [member for member in members if isinstance(member, dict)] if isinstance(members, list) else []


def _parts(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for message in messages for part in _objects(message.get("content"))]


def _choices(event: Event) -> list[dict[str, Any]]:
    return [] if event.data == "[DONE]" else _objects(_data(event).get("choices"))


def _refuse_end(choice: dict[str, Any]) -> None:
    if choice.get("finish_reason"):
        raise NotContinued(_COMPLETE)


def _note(sent: Sent, data: dict[str, Any], text: Any, reasoning: Any = None) -> None:
    """Add the text of an event. With the progress of the prompt, that is what the client itself has begun."""
    pieces = 0 if "prompt_progress" in data else 1
    if isinstance(text, str) and text:
        sent.text += text
        sent.pieces += pieces
    if isinstance(reasoning, str) and reasoning:
        sent.reasoning += reasoning
        sent.pieces += pieces
    if (text or reasoning) and type(made := _object(data, "timings").get("predicted_n")) is int:
        sent.pieces, sent.is_counted = made, True  # of timings_per_token


def _continue_prompt(body: Body, sent: Sent) -> None:
    prompt = value(body, "prompt")
    parts: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(parts, list):
        raise NotContinued("the prompt is not text")
    kinds = {type(part) for part in parts}
    # Texts and tokens in one list are one prompt. Several texts, and lists, are several prompts.
    if not kinds <= {int, str} or (len(parts) > 1 and int not in kinds):
        raise NotContinued("the prompt is more than one text")
    if sent.is_empty:
        return
    if sent.tokens:
        body["prompt"] = raw([*parts, *sent.tokens])
    elif kinds == {str}:
        body["prompt"] = raw(parts[0] + sent.text)
    else:
        body["prompt"] = raw([*parts, sent.text])


def _identity(chunk: Any) -> dict[str, Any]:
    names = ("id", "created", "model", "system_fingerprint")
    return {name: chunk[name] for name in names if name in chunk} if isinstance(chunk, dict) else {}


def _count_all(owner: dict[str, Any], prompt: str, new: str, pieces: int, *, is_full: bool) -> None:
    """Count in ``usage`` and ``timings`` what the client has as new tokens, not as tokens of the prompt."""
    usage = owner.get("usage")
    if isinstance(usage, dict) and type(usage.get(prompt)) is int and type(usage.get(new)) is int:
        dropped = usage[new] if is_full else 0
        usage[prompt] -= pieces
        usage[new] += pieces - dropped
        if "total_tokens" in usage:
            usage["total_tokens"] -= dropped
    _join_timings(owner, pieces, is_full=is_full)


def _join_timings(owner: dict[str, Any], pieces: int, *, is_full: bool) -> None:
    """Count the tokens as those of the whole answer; the times are those of the last part."""
    timings = owner.get("timings")
    if not isinstance(timings, dict) or type(timings.get("predicted_n")) is not int:
        return
    timings["predicted_n"] = pieces + (0 if is_full else timings["predicted_n"])
    for name in ("prompt_n", "cache_n"):  # what the client has was a part of the second prompt
        if type(timings.get(name)) is int:
            taken = min(pieces, timings[name])
            timings[name] -= taken
            pieces -= taken
