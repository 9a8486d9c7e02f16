"""Paths in llama-server's answers, as clients that may only infer see them."""

from __future__ import annotations

import json

import pytest

from llamasup.models.redaction import whole_and_plain, without_folders


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/srv/models/tiny.gguf", "tiny.gguf"),
        ("models/tiny.gguf", "tiny.gguf"),
        ("tiny.gguf", "tiny.gguf"),
        ("C:\\models\\tiny.gguf", "tiny.gguf"),
        ('/srv/a "b"/\u00e9.gguf', "\u00e9.gguf"),
        ("/srv/models/", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("key", ["model_path", "path"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_paths_become_names_of_the_same_length(path: str, name: str, key: str, ascii_only: bool) -> None:
    template = '{{ "model_path":"/not/one" }} \\"path\\":\\"/nor/this\\"'
    answer = json.dumps([{"id": 0, key: path, "chat_template": template}], ensure_ascii=ascii_only).encode()
    redacted = without_folders(answer)
    assert json.loads(redacted) == [{"id": 0, key: name, "chat_template": template}]
    assert len(redacted) == len(answer)


def test_other_answers_stay_unchanged() -> None:
    for answer in (b"", b"nonsense", b'{"path":7}', b'{"path":"/unfinished', b'{"paths":"/a/b"}'):
        assert without_folders(answer) == answer


def test_head_has_no_range_and_no_coding() -> None:
    kept = b"GET /props HTTP/1.1\r\nHost: localhost\r\nx-a: range: b\r\n"
    assert whole_and_plain(kept + b"range: bytes=9-\r\naccept-encoding: gzip\r\n") == kept
