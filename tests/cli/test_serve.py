"""What ``llamasup serve`` is given on its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.cli.commands.serve import serve_models
from llamasup.cli.foreground import OutputOptions
from llamasup.errors import ModelMissing
from llamasup.system.storage.paths import require_folders


def test_a_folder_on_the_command_line_that_is_not_there_was_mistyped(tmp_path: Path) -> None:
    require_folders([tmp_path], of="--models-dir")
    with pytest.raises(ModelMissing, match="there is no such folder"):
        require_folders([tmp_path, tmp_path / "modles"], of="--models-dir")


def test_a_file_is_served_by_run(tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.touch()
    with pytest.raises(ModelMissing, match="is a file") as raised:
        require_folders([file], of="--models-dir")
    assert raised.value.remedy == f"To serve only this file: llamasup run '{file}'"


def test_a_folder_in_nobodys_home_is_said_to_be_none(capfd: pytest.CaptureFixture[str]) -> None:
    output = OutputOptions(events=None, log_level="info", log_format="text")
    code = serve_models(
        None, output, began_s=0.0, models_dir=("~nobody-has-this-name/m",), watch=False, token_file=None
    )
    assert code == 66
    assert "--models-dir: ~nobody-has-this-name/m: there is no user" in capfd.readouterr().err


def test_a_config_that_the_environment_names_counts_beside_folders_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may hold keys and limits."""
    config = tmp_path / "c.yaml"
    config.write_text("max_loaded: none\n")
    monkeypatch.setenv("LLAMASUP_CONFIG", str(config))
    output = OutputOptions(events=None, log_level="info", log_format="text")
    code = serve_models(None, output, began_s=0.0, models_dir=(str(tmp_path),), watch=False, token_file=None)
    assert code == 78
    assert f"{config}:1: max_loaded" in capfd.readouterr().err
