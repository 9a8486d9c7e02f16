from __future__ import annotations

import pytest

from llamasup.batch.api.form import MAX_FIELD_BYTES, MAX_FIELDS, UploadForm
from llamasup.errors import UsageInvalid

TYPE = "multipart/form-data; boundary=xyz"
END = b"--xyz--\r\n"


def part(name: str, content: bytes, *, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'--xyz\r\nX-Other: 1\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + content + b"\r\n"


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_file_and_fields_are_the_same_however_the_body_arrives(step: int) -> None:
    content = b"line 1\r\n--xy\nline 2\r\n"
    body = part("purpose", b"batch") + part("file", content, filename="in.jsonl") + END
    form = UploadForm(TYPE)
    got = b"".join(form.feed(body[at : at + step]) for at in range(0, len(body), step))
    assert got == content
    assert form.fields == {"purpose": "batch"}
    assert form.filename == "in.jsonl"
    assert form.is_complete


def test_form_that_ends_too_early_is_not_complete() -> None:
    form = UploadForm(TYPE)
    form.feed(part("file", b"x", filename="in.jsonl"))
    assert not form.is_complete


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data"])
def test_body_that_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(UsageInvalid, match="multipart/form-data"):
        UploadForm(content_type)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no boundary at all", "invalid"),
        (part("file", b"1", filename="a") + part("file", b"2", filename="b"), "two files"),
        (b"".join(part(str(n), b"") for n in range(MAX_FIELDS + 1)), "fields"),
        (part("purpose", b"x" * (MAX_FIELD_BYTES + 1)), "bytes"),
    ],
)
def test_invalid_form_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(UsageInvalid, match=reason):
        UploadForm(TYPE).feed(body)
