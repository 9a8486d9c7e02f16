"""Reads the JSON body of a request to the control API."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from llamasup.errors import BodyTooLarge, UsageInvalid

MAX_BYTES = 4 << 20  # the largest config, written as a string of JSON

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
