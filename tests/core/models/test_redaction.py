"""Clients see the names of files, but not their folders."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.models.redaction import redact_paths, whole_and_plain, without_folders

KNOWN = ("/srv/my models/tiny.gguf", "/blobs/77ab", "/tiny.gguf", r"/srv/my models/a\1.gguf")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/my models/tiny.gguf: truncated", "tiny.gguf: truncated"),
        ("'/srv/my models/tiny.gguf' is cut off", "'tiny.gguf' is cut off"),
        ("Did you mean '/srv/my models/small.gguf'?", "Did you mean 'small.gguf'?"),
        ("There is no other in /srv/my models.", "There is no other in its folder."),
        ("/blobs/77ab: may not be read", "77ab: may not be read"),
        ("/tiny.gguf: may not be read", "tiny.gguf: may not be read"),
        ("org/repo from https://host/org/repo at 3 MiB/s", "org/repo from https://host/org/repo at 3 MiB/s"),
        ("It needs 3 GiB", "It needs 3 GiB"),
        (r"/srv/my models/a\1.gguf: truncated", r"a\1.gguf: truncated"),
    ],
)
def test_known_path_becomes_its_name(text: str, told: str) -> None:
    assert redact_paths(text, KNOWN) == told


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("failed to open GGUF file '/srv/secret place/x.gguf'", "failed to open GGUF file 'x.gguf'"),
        ("/opt/lib/libggml.so: undefined symbol: x", "libggml.so: undefined symbol: x"),
        ("2 files are called 'x': /a/x.gguf, /b/x.gguf", "2 files are called 'x': x.gguf, x.gguf"),
        ("'/a b/x.gguf' and '/c d/y.gguf' differ", "'x.gguf' and 'y.gguf' differ"),
        ("(/opt/llama-server)", "(llama-server)"),
        ("--model=/srv/x.gguf", "--model=x.gguf"),
        ("~/models/x.gguf", "x.gguf"),
        ("~eve/models/x.gguf", "x.gguf"),
        ("../models/x.gguf", "x.gguf"),
        ("'/srv/my models/old/tiny.gguf' is cut off", "'tiny.gguf' is cut off"),
    ],
)
def test_unknown_path_is_replaced_by_its_file_name(text: str, named: str) -> None:
    assert redact_paths(text, KNOWN) == named


KNOWN_ON_WINDOWS = (r"C:\Users\Eve\my models\tiny.gguf", r"\\host\share\tiny.gguf", r"D:\tiny.gguf")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (r"C:\Users\Eve\my models\tiny.gguf: truncated", "tiny.gguf: truncated"),
        (r"c:/users/eve/my models/tiny.gguf: truncated", "tiny.gguf: truncated"),
        (r"'C:\\Users\\Eve\\my models\\tiny.gguf' is cut off", "'tiny.gguf' is cut off"),
        (r"Did you mean 'C:\\Users\\Eve\\my models\\small.gguf'?", "Did you mean 'small.gguf'?"),
        (r"'C:\Users\Eve\my models\old\tiny.gguf' is cut off", "'tiny.gguf' is cut off"),
        (r"There is no other in C:\Users\Eve\my models.", "There is no other in its folder."),
        (r"\\host\share\tiny.gguf: may not be read", "tiny.gguf: may not be read"),
        (r"D:\tiny.gguf: may not be read", "tiny.gguf: may not be read"),
        (r"failed to open GGUF file 'E:\secret place\x.gguf'", "failed to open GGUF file 'x.gguf'"),
        (r"'\\?\E:\secret place\x.gguf'", "'x.gguf'"),
        (r"2 files: E:\a\x.gguf, E:/b/y.gguf", "2 files: x.gguf, y.gguf"),
        (r"--model=\\host\share\x.gguf", "--model=x.gguf"),
        (r"(E:\bin\llama-server.exe)", "(llama-server.exe)"),
    ],
)
def test_paths_of_windows_become_names(text: str, named: str) -> None:
    assert redact_paths(text, KNOWN_ON_WINDOWS) == named


@pytest.mark.parametrize(
    "text",
    [
        r"E:\secret place\x.gguf",
        r"'E:\secret place' cannot be read",
        r"below E:\srv",
        "in \\\\host\\share (old)\\",
        r"in C:\Users\Eve\my models-private",
        r"E:\x.gguf: see C:\private",
    ],
)
def test_text_with_an_ambiguous_path_of_windows_is_dropped(text: str) -> None:
    assert redact_paths(text, KNOWN_ON_WINDOWS) == ""


@pytest.mark.parametrize("text", [r"unexpected escape \\d in '\s+'", "see http://host/x", "a: /health"])
def test_text_without_a_path_of_windows_stays(text: str) -> None:
    assert redact_paths(text, KNOWN_ON_WINDOWS) == text


@pytest.mark.parametrize(
    "text",
    [
        "llama-server did not answer 3 /health requests in a row: the process is stopped.",
        "llama-server answers /health, but its last 3 answers were errors",
        "cannot read /health.",
    ],
)
def test_endpoint_of_our_own_messages_is_no_path(text: str) -> None:
    assert redact_paths(text, ()) == text


@pytest.mark.parametrize(
    "text",
    [
        "/health.d/a b",
        "open /health/secret folder/m.gguf",
        "open /healthy/a b/m.gguf",
        "/srv/my models/tiny.gguf: leads to /srv/secret place/none.gguf, which is in none of the folders",
        "/srv/secret place/x.gguf",
        "/srv/x.gguf: see https://host/org/repo",
        "in /srv/models (old)/",
        "in (old)/x.gguf",
        "/srv/my models/old files/tiny.gguf: truncated",
        "in /blobs private/x.gguf",
        "/tiny.gguf private/x.gguf",
        "in /srv/my models-private",
        "'/srv/secret place' cannot be read",
        "below /srv",
        "in /blobs:private/place",
        "see /srv.",
    ],
)
def test_text_with_an_ambiguous_path_is_dropped(text: str) -> None:
    assert redact_paths(text, KNOWN) == ""


# Only folders have upper case, so an upper-case letter in the result comes from the name of a folder.
folders = st.from_regex(r"\(?[A-Z]([A-Z.,:' -]{0,6}[A-Z])?\)?", fullmatch=True)
files = st.from_regex(r"[a-z]([a-z.' -]{0,6}[a-z])?(\.gguf)?", fullmatch=True)
paths_of_posix = st.builds(
    lambda root, parts, name: root + "".join(f"{part}/" for part in parts) + name,
    st.sampled_from(["/", "~/", "../"]),
    st.lists(folders, max_size=4),
    files,
)
paths_of_windows = st.builds(
    lambda root, parts, name: root + "".join(f"{part}\\" for part in parts) + name,
    st.sampled_from(["c:\\", "d:/", "\\\\host\\"]),
    st.lists(folders, max_size=4),
    files,
)
absolute_paths = st.one_of(paths_of_posix, paths_of_windows)
parts_of_texts = st.one_of(
    absolute_paths,
    absolute_paths.map(repr),
    absolute_paths.map(lambda path: f'"{path}"'),
    absolute_paths.map(lambda path: f"({path})"),
    st.sampled_from(["cannot be read:", "is cut off, and", "org/repo", "see https://host/file", "'x'"]),
)


@given(st.lists(parts_of_texts, max_size=5), st.lists(absolute_paths, max_size=2))
def test_result_contains_no_name_of_a_folder(parts: list[str], known: list[str]) -> None:
    text = " ".join([*parts, *known])
    assert not re.search("[A-Z]", redact_paths(text, [path for path in known if path[0] not in "~."]))


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
