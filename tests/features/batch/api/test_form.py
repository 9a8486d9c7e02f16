from __future__ import annotations

import pytest

from llamasup.errors import UsageInvalid
from llamasup.features.batch.api.form import (
    MAX_FIELD_BYTES,
    MAX_HEAD_BYTES,
    MAX_OUTSIDE_BYTES,
    MAX_PARTS,
    UploadForm,
)

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


@pytest.mark.parametrize(
    ("disposition", "name", "filename"),
    [
        ('form-data; name="file"; filename="a;b \\"c\\".jsonl"', None, 'a;b "c".jsonl'),
        ("form-data; name=file; filename*=utf-8''%C3%A4.jsonl", None, "ä.jsonl"),
        ('form-data; name="file"; filename="ä.jsonl"', None, "ä.jsonl"),
        ("form-data; name=file", None, ""),
        ('form-data; name="expires_after[seconds]"', "expires_after[seconds]", None),
        ("form-data", "", None),
        (";;;", "", None),
    ],
)
def test_names_are_read_as_clients_write_them(
    disposition: str, name: str | None, filename: str | None
) -> None:
    form = UploadForm(TYPE)
    got = form.feed(f"--xyz\r\nContent-Disposition: {disposition}\r\n\r\n1\r\n--xyz--".encode())
    assert form.filename == filename
    assert form.fields == ({} if name is None else {name: "1"})
    assert got == (b"1" if name is None else b"")
    assert form.is_complete


# What Python decodes of these, and how, depends on its version.
UNUSABLE = ["undefined", "idna", "utf-8\0", "punycode", "rot13", "utf-16"]


@pytest.mark.parametrize("charset", UNUSABLE)
@pytest.mark.parametrize("name", ["name", "filename"])
def test_name_in_an_unusable_character_set_is_refused(charset: str, name: str) -> None:
    head = f"Content-Disposition: form-data; name=file; {name}*={charset}''%FF"
    head = head.replace("name=file; name", "name")
    with pytest.raises(UsageInvalid, match="character set"):
        UploadForm(TYPE).feed(f"--xyz\r\n{head}\r\n\r\n1\r\n".encode())


@pytest.mark.parametrize("charset", UNUSABLE)
def test_boundary_in_an_unusable_character_set_is_refused(charset: str) -> None:
    with pytest.raises(UsageInvalid, match="character set"):
        UploadForm(f"multipart/form-data; boundary*={charset}''xyz%FF")


@pytest.mark.parametrize("parts", ["{0}*=utf-8''a; {0}*0*=b", "{0}*1*=b; {0}*=utf-8''a"])
@pytest.mark.parametrize("name", ["boundary", "name", "filename"])
def test_parts_with_and_without_a_number_are_no_internal_error(name: str, parts: str) -> None:
    """Some versions of Python cannot sort them, and others join them."""
    given = parts.format(name)
    content_type = f"multipart/form-data; {given}" if name == "boundary" else TYPE
    disposition = f"form-data; name=file; {given}" if name == "filename" else f"form-data; {given}"
    try:
        form = UploadForm(content_type)
        form.feed(f"--xyz\r\nContent-Disposition: {disposition}\r\n\r\n1\r\n".encode())
        found = form.filename if name == "filename" else next(iter(form.fields))
    except UsageInvalid as error:
        found = error.message.partition(": ")[2]
    assert found in (
        "a parameter has parts with and without a number.",
        "it does not begin with its boundary.",
        *("b", "ab"),
    )


@pytest.mark.parametrize("head", [b"", b"\r\nnonsense", b"\r\nContent-Disposition"])
def test_part_without_a_name_is_a_field_without_one(head: bytes) -> None:
    form = UploadForm(TYPE)
    form.feed(b"--xyz" + head + b"\r\n\r\n1\r\n" + END)
    assert form.fields == {"": "1"}


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        f"multipart/form-data; boundary={'x' * 201}",
        f"{TYPE}; a={'x' * 1000}",
    ],
)
def test_body_that_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(UsageInvalid, match="multipart/form-data"):
        UploadForm(content_type)


@pytest.mark.check("X8", "400")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no boundary at all", "invalid"),
        (part("file", b"1", filename="a") + part("file", b"2", filename="b"), "two files"),
        (part("same", b"") * (MAX_PARTS + 1), f"more than {MAX_PARTS} parts"),
        (part("purpose", b"x" * (MAX_FIELD_BYTES + 1)) + END, "fields has more"),
        (part("x" * MAX_HEAD_BYTES, b""), "head of a part"),
        (part("file", b"", filename="a") + END + bytes(MAX_OUTSIDE_BYTES), "outside its file"),
        (b"preamble\r\n" + part("file", b"1", filename="a"), "begin with its boundary"),
        (part("file", b"1\r\n--xyz is no boundary", filename="a"), "followed by other bytes"),
    ],
)
def test_invalid_form_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(UsageInvalid, match=reason):
        UploadForm(TYPE).feed(body)
