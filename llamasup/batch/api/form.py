"""Reads the form of an upload piece by piece: small fields, and one file that is never held whole (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llamasup.errors import UsageInvalid

__all__ = ["UploadForm"]

MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 4096


class UploadForm:
    """``fields``: the fields so far, by name. ``filename``: of the file; None before it has begun."""

    def __init__(self, content_type: str) -> None:
        """Raises UsageInvalid."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise _invalid("the Content-Type is not multipart/form-data with a boundary")
        self._fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._header = [bytearray(), bytearray()]  # the name and the value of the header being read
        self._disposition = b""
        self._field: bytearray | None = None
        self._file = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._part_data,
                "on_end": self._ends,
            },
        )

    @property
    def fields(self) -> Mapping[str, str]:
        return {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file in this piece of the body. Raises UsageInvalid."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from None
        piece = bytes(self._file)
        self._file.clear()
        return piece

    # --- of the parser

    def _part_begins(self) -> None:
        self._disposition = b""
        self._header = [bytearray(), bytearray()]

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _header_ends(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = [bytearray(), bytearray()]

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            if self.filename is not None:
                raise _invalid("it has two files")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self._field = None
            return
        if len(self._fields) >= MAX_FIELDS:
            raise _invalid(f"it has more than {MAX_FIELDS} fields")
        self._field = self._fields[name] = bytearray()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._file += data[start:end]
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise _invalid(f"one of its fields has more than {MAX_FIELD_BYTES} bytes")

    def _ends(self) -> None:
        self.is_complete = True


def _invalid(reason: str) -> UsageInvalid:
    return UsageInvalid(
        f"The form of the upload is invalid: {reason}.",
        remedy="Send multipart/form-data with the fields purpose and file.",
    )
