from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.errors import ConfigInvalid
from llamasup.effects.keys import read_api_keys


def test_without_a_file_and_a_variable_there_is_no_key() -> None:
    assert read_api_keys(None, {}) == ()
    assert read_api_keys(None, {"LLAMASUP_API_KEY": ""}) == ()


def test_keys_come_from_the_variable_and_from_the_lines_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# team\none\n\n  two  \none\n")
    assert read_api_keys(tmp_path / "keys", {"LLAMASUP_API_KEY": "zero"}) == ("zero", "one", "two")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key"),
        (b"# none\n", "holds no key"),
        (b"\xff\xfe", "UTF-8"),
        (b"a b\n", "no HTTP header"),
    ],
)
def test_a_file_that_protects_nothing_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigInvalid, match=says):
        read_api_keys(tmp_path / "keys", {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="No such file"):
        read_api_keys(tmp_path / "none", {})


def test_a_folder_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="no such user"):
        read_api_keys(Path("~nobody-of-this-name/keys"), {})


def test_a_refused_key_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read_api_keys(None, {"LLAMASUP_API_KEY": "geheim €"})
    assert "geheim" not in caught.value.message
