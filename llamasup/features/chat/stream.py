"""Requests answers as streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final, Self

import msgspec

from llamasup.core.control.client import mapped_errors
from llamasup.core.http.errors import error_from
from llamasup.core.http.httpx_client import httpx, trusted
from llamasup.core.http.sse import Lines
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import ControlFailed, LlamasupError, UsageInvalid
from llamasup.features.chat.answer import Chunk, chunk_of
from llamasup.features.chat.conversation import Conversation

_PATH: Final = "/v1/chat/completions"
_JSON: Final = {"content-type": "application/json"}
_CONNECT_S = 10.0
_MAX_ERROR_BYTES = 1 << 20


class Client:
    """A client of the inference API. It waits as long as the model needs: for a load, and for the prompt."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=httpx.Headers(
                {} if key is None else {"authorization": f"Bearer {key}"}, encoding="utf-8"
            ),
            timeout=httpx.Timeout(_CONNECT_S, read=None),
            trust_env=False,
            verify=trusted(url),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(self, conversation: Conversation) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of the next answer. Raises the error that refuses or ends it."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            body = msgspec.json.encode({**conversation.body(), **options})
        except UnicodeEncodeError:
            raise UsageInvalid("The message or the system prompt is not UTF-8 text.") from None
        lines, finished = Lines(), False
        with mapped_errors(self._url, f"POST {_PATH}"):
            async with self._http.stream("POST", _PATH, content=body, headers=_JSON) as response:
                if not response.is_success:
                    raise _refusal(response.status_code, await _json(response))
                async for data in response.aiter_bytes():
                    for line in lines.add(data):
                        if (chunk := chunk_of(line)) is None:
                            continue
                        if chunk.error is not None:
                            raise error_from(502, {"error": chunk.error})
                        finished = finished or any(choice.finish_reason for choice in chunk.choices)
                        yield chunk
        if not finished:
            raise ControlFailed("The answer ended before it was complete.")


def _refusal(status: int, answered: object) -> LlamasupError:
    error = error_from(status, answered)
    if not error.remedy and "context size" in error.message:  # llama-server's own error (b11434)
        error.remedy = "Empty the conversation with /clear, or start llamasup with a larger --ctx-size."
    return error


async def _json(response: httpx.Response) -> object:
    import json

    content = b""
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > _MAX_ERROR_BYTES:
            return None
    try:
        return json.loads(content)
    except INVALID_JSON:
        return None
