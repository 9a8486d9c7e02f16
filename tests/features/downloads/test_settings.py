"""The section ``downloads`` of a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.config.reading import config_of, issue_of
from tests.core.config.test_api_changes import refused
from tests.core.config.test_commands import missing, written

MIRROR = "downloads: {endpoint: 'https://mirror', token_file: /token}"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{endpoint: 'http://h'}", "http is refused; use https"),
        ("{parallel: 17}", "'17'; expected a whole number from 1 to 16"),
    ],
)
def test_invalid_section_is_refused(section: str, message: str) -> None:
    found = issue_of(f"models_dir: m\ndownloads: {section}\n")
    assert found.startswith("c.yaml:2: downloads")
    assert message in found


def test_private_addresses_allow_http() -> None:
    config = config_of(
        "{models: {a: {url: 'http://h/x'}}, downloads: {private_addresses: true, endpoint: 'http://h'}}"
    )

    assert config.models["a"].source == "http://h/x"


def test_model_over_http_is_refused() -> None:
    found = issue_of("models: {a: {url: 'http://h/x.gguf'}}")
    assert "models.a.url: http is refused; use https" in found


def test_missing_file_and_folder_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    path = written(tmp_path, "models_dir: .\ndownloads: {token_file: ./none, folder: file}\n")
    assert missing(path) == [
        f"c.yaml:2: downloads.folder: '{tmp_path}/file': Not a directory",
        f"c.yaml:2: downloads.token_file: '{tmp_path}/none': No such file or directory",
    ]


def test_token_in_place_of_its_file_is_not_shown(tmp_path: Path) -> None:
    path = written(tmp_path, "models_dir: .\ndownloads: {token_file: hf_SECRET}\n")
    assert missing(path) == [
        "c.yaml:2: downloads.token_file: the file (not shown: it may be a secret) cannot be read"
    ]


@pytest.mark.check("X15")
@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        ("https://mirror", "https://evil", "endpoint: (not shown: it may be a secret) names"),
        ("endpoint: 'https://mirror', ", "", "endpoint: (not shown: it may be a secret) is removed"),
        ("{endpoint", "{private_addresses: true, endpoint", "private_addresses: 'true' names a host"),
        ("/token", "/etc/hostname", "token_file: '/etc/hostname' names a path"),
    ],
)
def test_config_over_the_api_names_no_other_hub(old: str, new: str, start: str) -> None:
    (found,) = refused(MIRROR.replace(old, new), MIRROR)
    assert found.startswith(f"downloads.{start}")
    assert refused(MIRROR.replace(old, new), MIRROR, full=True) == []


def test_false_names_no_host() -> None:
    assert refused(MIRROR.replace("{", "{private_addresses: false, "), MIRROR) == []
