"""The texts of licenses in a bundle: complete, or the bundle is not made."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bundling.license_texts import LicenseTexts, refusal


@pytest.fixture
def common(tmp_path: Path) -> Path:
    folder = tmp_path / "common"
    folder.mkdir()
    (folder / "GPL-3").write_text("the text of the GPL")
    return folder


def test_text_comes_with_the_common_licenses_it_refers_to(tmp_path: Path, common: Path) -> None:
    copyright_ = tmp_path / "copyright"
    copyright_.write_text("It is in /usr/share/common-licenses/GPL-3.\n")
    texts = LicenseTexts(tmp_path / "licenses", None, common)
    texts.add("libgcc-s1", [tmp_path / "no-such", copyright_])
    assert (texts.folder / "libgcc-s1.txt").read_text() == copyright_.read_text()
    assert (texts.folder / "common-licenses" / "GPL-3").read_text() == "the text of the GPL"
    assert texts.missing == []


def test_missing_texts_are_named(tmp_path: Path, common: Path) -> None:
    copyright_ = tmp_path / "copyright"
    copyright_.write_text("/usr/share/common-licenses/BSD")
    texts = LicenseTexts(tmp_path / "licenses", None, common)
    texts.add_debian_package("libssl.so.3", None)
    texts.add_debian_package("libz.so.1", "no-such-package")
    texts.add("libbsd", [copyright_])
    assert texts.missing == ["libssl.so.3", "no-such-package", f"libbsd ({common / 'BSD'})"]


def test_text_that_is_given_is_used(tmp_path: Path, common: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "libssl.so.3.txt").write_text("the text of Apache")
    texts = LicenseTexts(tmp_path / "licenses", given, common)
    texts.add_debian_package("libssl.so.3", None)
    assert (texts.folder / "libssl.so.3.txt").read_text() == "the text of Apache"
    assert texts.missing == []


def test_missing_texts_are_a_failure_where_debian_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message, code = refusal(["libssl.so.3"], tmp_path)
    assert (code, "libssl.so.3" in message, "--licenses FOLDER" in message) == (1, True, True)
    program = tmp_path / "dpkg-query"
    program.touch(0o755)
    assert refusal(["libssl.so.3"], None) == (message, 1)


def test_bundle_cannot_be_made_where_no_package_owns_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message, code = refusal(["libssl.so.3"], None)
    assert code == 77
    assert "no dpkg-query" in message
