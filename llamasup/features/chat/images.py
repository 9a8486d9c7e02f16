"""Images for the messages of a chat."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llamasup.core.system.storage.folders import expanded, read_bounded
from llamasup.errors import UsageInvalid

MAX_IMAGE_BYTES: Final = 20 << 20
"""Larger images are refused: their body would be larger than llamasup's limit of 32 MiB."""

_IMAGES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)
"""The formats that llama-server reads (b11434, stb_image), by the first bytes of a file."""


def read_image(path: Path) -> Mapping[str, Any]:
    """Return the part of a message for an image file. Raises UsageInvalid."""
    try:
        content, _ = read_bounded(expanded(path), MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageInvalid(
            f"The image {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    return image_part(content, path.name)


def image_part(content: bytes, name: str) -> Mapping[str, Any]:
    """Return the part of a message for an image file. Raises UsageInvalid for other formats and sizes."""
    if len(content) > MAX_IMAGE_BYTES:
        raise UsageInvalid(
            f"The image {name!r} has more than {MAX_IMAGE_BYTES >> 20} MiB.", remedy="Use a smaller image."
        )
    kind = next((kind for first, kind in _IMAGES if content.startswith(first)), None)
    if kind is None:
        raise UsageInvalid(
            f"{name!r} is no image that llama-server reads.", remedy="Use a PNG, JPEG, GIF or BMP file."
        )
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
