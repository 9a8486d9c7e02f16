"""Requests answers as streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Self

from llamasup.core.http.errors import error_from
from llamasup.core.http.httpx_client import TRUST_REMEDY, httpx, is_untrusted, trusted
from llamasup.core.http.sse import Lines
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, UsageInvalid
from llamasup.features.chat.answer import Chunk, chunk_of
from llamasup.features.chat.conversation import Conversation

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
        body = {**conversation.body(), **options}
        finished = False
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    raise _refusal(response.status_code, await _json(response))
                lines = Lines()
                async for data in response.aiter_bytes():
                    for line in lines.add(data):
                        if (chunk := chunk_of(line)) is None:
                            continue
                        if chunk.error is not None:
                            raise error_from(502, {"error": chunk.error})
                        finished = finished or any(choice.finish_reason for choice in chunk.choices)
                        yield chunk
        except UnicodeEncodeError:
            raise UsageInvalid("The message or the system prompt is not UTF-8 text.") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NotRunning(
                f"No llamasup answers at {self._url}: {str(error) or 'timed out'}.",
                remedy=TRUST_REMEDY if is_untrusted(error) else "Check whether it still runs: `llamasup ps`.",
            ) from None
        except httpx.HTTPError as error:
            raise ControlFailed(
                f"The connection to llamasup at {self._url} broke: {str(error) or type(error).__name__}.",
                remedy="Check whether it has exited.",
            ) from None
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
