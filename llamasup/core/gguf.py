"""Reads the header of a GGUF file: bytes in, facts (or "more bytes, please") out."""

from __future__ import annotations

from dataclasses import dataclass

from llamasup.core.model_facts import ChatTemplate, ModelClass, ModelFacts

__all__ = ["ChatTemplate", "ModelClass", "ModelFacts", "NeedMore", "read_header"]


@dataclass(frozen=True, slots=True)
class NeedMore:
    """The header goes on beyond the bytes given; call again with the first ``bytes_needed`` of the file."""

    bytes_needed: int


def read_header(header: bytes | memoryview, file_bytes: int) -> ModelFacts | NeedMore:
    """Facts from the first bytes of a model file of ``file_bytes``. Raises ModelInvalid."""
    raise NotImplementedError
