"""Which config file is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamasup.core.config import reading
from llamasup.core.config.reading import find_config, own_config
from llamasup.core.system.native import native
from llamasup.errors import ConfigInvalid


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "etc" / "config.yaml"
    path.parent.mkdir()
    monkeypatch.setattr(reading, "system_config", lambda: path)
    return path


def test_named_file_is_used_even_if_missing(tmp_path: Path) -> None:
    environ = {"LLAMASUP_CONFIG": "/none/env.yaml", "HOME": str(tmp_path)}

    assert find_config(Path("/none/given.yaml"), environ) == Path("/none/given.yaml")
    assert find_config(None, environ) == Path("/none/env.yaml")
    assert find_config(Path("x.yaml"), {}) == Path("x.yaml").absolute()


def test_config_of_the_user_comes_before_the_systems(tmp_path: Path, system: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "HOME": str(tmp_path), "LLAMASUP_CONFIG": ""}
    system.write_text("models_dir: m")
    assert find_config(None, environ) == system

    own = own_config(environ)
    own.parent.mkdir(parents=True)
    own.write_text("models_dir: m")
    assert find_config(None, environ) == own == tmp_path / "xdg/llamasup/config.yaml"


def test_relative_xdg_config_home_is_ignored() -> None:
    environ = {"XDG_CONFIG_HOME": "here", "HOME": "/home/ann"}

    assert own_config(environ) == Path("/home/ann/.config/llamasup/config.yaml")


def test_error_without_a_config_lists_the_searched_paths(tmp_path: Path, system: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        find_config(None, {"HOME": str(tmp_path)})

    assert str(tmp_path / ".config/llamasup/config.yaml") in caught.value.message
    assert str(system) in caught.value.message
    assert "llamasup config init" in caught.value.remedy


def test_only_the_users_config_counts_where_all_users_may_write_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(native, "config_folder", None)  # as on Windows
    with pytest.raises(ConfigInvalid) as caught:
        find_config(None, {"HOME": str(tmp_path)})
    own = tmp_path / ".config/llamasup/config.yaml"
    assert (
        caught.value.message == f"No config was found: {own} does not exist, and $LLAMASUP_CONFIG is not set."
    )


def test_unknown_user_is_reported() -> None:
    with pytest.raises(ConfigInvalid, match="names an unknown user"):
        find_config(Path("~nobody-at-all/x"), {})


def test_unreadable_config_is_not_skipped(
    tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may set which keys are valid."""
    system.write_text("models_dir: m")
    own = own_config({"HOME": str(tmp_path)})
    stat = Path.stat

    def refused(path: Path, **options: bool) -> os.stat_result:
        if path == own:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    assert find_config(None, {"HOME": str(tmp_path)}) == own
