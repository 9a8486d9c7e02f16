"""Reads and writes the JSON of the control API, and knows who sent a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llamasup.core.control.private_socket import THROUGH_PROXY
from llamasup.core.system.text import json_text
from llamasup.errors import BodyTooLarge, UsageInvalid

PREFIX: Final = "/llamasup/v1"
MAX_BYTES: Final = 4 << 20  # the largest config, written as a string of JSON

Body = TypeVar("Body")


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body as a ``kind``. Raises BodyTooLarge and UsageInvalid."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BYTES:
            raise BodyTooLarge(
                f"The body is larger than {MAX_BYTES} bytes.", remedy="No request to this path needs so much."
            )
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The text of the error names the place and the types, and no value.
        raise UsageInvalid(
            f"The body is not the JSON of this request: {error}.", remedy="docs/control.md describes it."
        ) from None


def json_answer(shown: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response that forbids caching, because the state may change at any time."""
    fresh = {"cache-control": "no-store", **(headers or {})}
    return Response(json_text(shown), status, fresh, media_type="application/json")


def is_from_proxy(request: Request) -> bool:
    """Whether a client of the proxy sent the request, and not the user of the machine."""
    return THROUGH_PROXY.decode() in request.headers
