"""An answer that may name folders of this machine, which clients do not see."""

from __future__ import annotations

from collections.abc import Callable

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk
from llamasup.core.models.redaction import without_folders


class RedactedBody:
    """Buffers a complete answer, and forwards it without the folders of this machine.

    Its size depends on the chat template of the model; clients cannot choose it.
    """

    __slots__ = ("_add", "_pieces", "_rechunk", "_write")

    def __init__(self, write: Callable[[bytes], None], *, is_chunked: bool, rechunk: bool) -> None:
        self._write = write
        self._rechunk = rechunk
        self._pieces: list[bytes] = []
        self._add = Dechunker(self._pieces.append).write if is_chunked else self._pieces.append

    def add(self, data: bytes) -> None:
        if data:
            self._add(data)

    def send(self) -> None:
        body = without_folders(b"".join(self._pieces))
        if self._rechunk:
            body = (chunk(body) if body else b"") + LAST_CHUNK
        if body:
            self._write(body)
