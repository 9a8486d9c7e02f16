"""The files of the console: what is served, and with which headers."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest

from llamasup.core.http.heads import Head, read_head
from llamasup.core.http.routes import CONTROL
from llamasup.core.proxy.console_access import ConsoleAccess
from llamasup.features.console.static_files import (
    FOLDER,
    PAGE_HEADERS,
    StaticFile,
    answer_of,
    read_static_files,
)

LARGE = b"export const text = 'x';\n" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "assets" / "pages").mkdir(parents=True)
    (tmp_path / "index.html").write_bytes(b"<!doctype html>")
    (tmp_path / "assets" / "a.js").write_bytes(LARGE)
    (tmp_path / "assets" / "pages" / "b.css").write_bytes(b"a{}")
    (tmp_path / "assets" / "notes.md").write_bytes(b"not served")
    (tmp_path / "assets" / "random.png").write_bytes(
        b"".join(bytes([n, n * 7 % 256]) for n in range(256)) * 3
    )
    return tmp_path


def test_page_and_files_have_their_paths_and_types(folder: Path) -> None:
    files = read_static_files(folder)
    assert {path: file.content_type for path, file in files.items()} == {
        "": "text/html; charset=utf-8",
        "assets/a.js": "text/javascript; charset=utf-8",
        "assets/pages/b.css": "text/css; charset=utf-8",
        "assets/random.png": "image/png",
    }


def test_large_file_is_compressed_for_a_client_that_reads_gzip(folder: Path) -> None:
    file = read_static_files(folder)["assets/a.js"]
    status, body, headers = answer_of(file, "br;q=1.0, GZIP;q=0.8", "")
    assert (status, gzip.decompress(body), headers["content-encoding"]) == (200, LARGE, "gzip")
    assert headers["vary"] == "accept-encoding"
    status, body, headers = answer_of(file, "identity", "")
    assert (status, body, "content-encoding" in headers) == (200, LARGE, False)


def test_small_file_is_never_compressed(folder: Path) -> None:
    file = read_static_files(folder)["assets/pages/b.css"]
    assert file.compressed is None
    assert answer_of(file, "gzip", "")[1] == b"a{}"


def test_file_that_gzip_does_not_shorten_is_sent_uncompressed(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_bytes(b"")
    (tmp_path / "noise.png").write_bytes(random.Random(1).randbytes(2000))
    assert read_static_files(tmp_path)["noise.png"].compressed is None


@pytest.mark.parametrize("coding", ["gzip", ""])
@pytest.mark.parametrize("sent", ["{tag}", "W/{tag}", '"other", {tag}', "*"])
def test_current_copy_of_a_client_is_not_sent_again(folder: Path, coding: str, sent: str) -> None:
    file = read_static_files(folder)["assets/a.js"]
    tag = answer_of(file, coding, "")[2]["etag"]
    status, body, headers = answer_of(file, coding, sent.format(tag=tag))
    assert (status, body, headers["etag"]) == (304, b"", tag)
    assert "content-encoding" not in headers
    assert headers["cache-control"] == "no-cache"


def test_changed_file_has_another_tag(folder: Path) -> None:
    before = read_static_files(folder)["assets/a.js"]
    (folder / "assets" / "a.js").write_bytes(LARGE + b"// new")
    after = read_static_files(folder)["assets/a.js"]
    assert before.etag != after.etag
    assert answer_of(after, "", f'"{before.etag}"')[0] == 200


@pytest.mark.check("X3")
def test_every_file_forbids_inline_scripts_and_other_hosts(folder: Path) -> None:
    for file in read_static_files(folder).values():
        _, _, headers = answer_of(file, "", "")
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert "http" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"


def test_headers_of_pages_have_no_line_break() -> None:
    assert not any(re.search(r"[\r\n]", value) for value in PAGE_HEADERS.values())


def test_shown_file_does_not_show_its_content() -> None:
    assert repr(StaticFile("text/css", b"abc", None, "x")) == "StaticFile('text/css', 3 bytes)"


@pytest.mark.check("X3")
def test_shipped_files_keep_the_policy() -> None:
    """What the policy forbids, a browser would only report."""
    files = read_static_files()
    page = files[""].content.decode()
    assert not re.search(
        r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", page, re.IGNORECASE
    )
    for path, file in files.items():
        if path.endswith((".js", ".css", ".html")) or path == "":
            # An XML namespace is a name, and no browser opens it.
            text = re.sub(r"http://www\.w3\.org/[\w/]+", "", file.content.decode())
            foreign = re.findall(r"(?:src|href|url|import|fetch)\W{0,4}https?://[^\s\"')]+", text)
            assert not foreign, path


def test_every_shipped_file_has_a_path_that_the_proxy_opens() -> None:
    access = ConsoleAccess(is_on=True)
    for path in read_static_files():
        head = read_head(b"GET", b"/llamasup/" + path.encode(), "1.1", [(b"host", b"localhost")])
        assert isinstance(head, Head)
        assert head.route is CONTROL
        assert access.judge(head) is None, path


def test_every_shipped_file_is_served() -> None:
    shipped = {file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*") if file.is_file()}
    served = {path or "index.html" for path in read_static_files()}
    assert {path for path in shipped - served if "/LICENSE." not in path} == set()
