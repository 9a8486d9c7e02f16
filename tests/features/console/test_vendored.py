"""The libraries of the console are as scripts/vendor_console.py pins them, and its files are small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import shutil
from pathlib import Path

import pytest

from scripts.vendor_console import VENDOR, Refused, for_the_page, mistakes, verify

STATIC = VENDOR.parents[1]
MOST_BYTES = 200_000
OTHER_ADDRESS = re.compile(
    r"""(?:src|href)=["'](?!assets/|data:|#)[^"']*|(?:import|url)\(\s*["']?https?:[^)]*"""
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(VENDOR, tmp_path / "vendor")


def test_vendored_files_are_those_of_the_manifest() -> None:
    assert mistakes(VENDOR) == []


def test_changed_file_is_found(copy: Path) -> None:
    with (copy / "htm.module.js").open("ab") as file:
        file.write(b"\n")
    (mistake,) = mistakes(copy)
    assert mistake.startswith("htm.module.js has the SHA-256 ")


def test_missing_and_unknown_files_are_found(copy: Path) -> None:
    (copy / "LICENSE.htm").rename(copy / "other.js")
    assert mistakes(copy) == ["other.js is not in versions.json", "LICENSE.htm is missing"]


def test_archive_with_another_checksum_is_refused() -> None:
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(b"archive").digest()).decode()
    verify("preact", b"archive", integrity)
    with pytest.raises(Refused, match="preact: the archive has sha512-"):
        verify("preact", b"other", integrity)


def test_bare_import_of_preact_becomes_relative() -> None:
    text = b'import{options as n}from"preact";let x;\n//# sourceMappingURL=hooks.module.js.map\n'
    assert for_the_page("hooks.module.js", text) == b'import{options as n}from"./preact.module.js";let x;\n'
    assert for_the_page("LICENSE.preact", text) == text


def test_console_has_at_most_200_kb_gzipped() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    total = sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in files)
    assert len(files) > 10
    assert total <= MOST_BYTES


def test_pages_load_nothing_from_another_server() -> None:
    for path in (*STATIC.rglob("*.html"), *STATIC.rglob("*.css"), *STATIC.glob("assets/**/*.js")):
        assert not OTHER_ADDRESS.findall(path.read_text("utf-8")), path
