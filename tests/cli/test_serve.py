"""The command line of ``llamasup serve``."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.cli.commands.serve import serve_models, with_overrides
from llamasup.cli.foreground import OutputOptions
from llamasup.core.config.config_keys import Config
from llamasup.core.settings.model import ModelSettings
from llamasup.core.system.storage.paths import require_folders
from llamasup.errors import ModelMissing
from tests.e2e.driver import run_to_end


def serve(folder: str) -> int:
    output = OutputOptions(events=None, log_level="info", log_format="text")
    return serve_models(None, output, began_s=0.0, models_dir=(folder,), watch=False, token_file=None)


def test_missing_models_dir_is_refused(tmp_path: Path) -> None:
    require_folders([tmp_path], of="--models-dir")
    with pytest.raises(ModelMissing, match="there is no such folder"):
        require_folders([tmp_path, tmp_path / "modles"], of="--models-dir")


def test_file_as_models_dir_is_refused_with_hint_to_run(tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.touch()
    with pytest.raises(ModelMissing, match="is a file") as raised:
        require_folders([file], of="--models-dir")
    assert raised.value.remedy == f"To serve only this file: llamasup run '{file}'"


def test_models_dir_in_home_of_unknown_user_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert serve("~nobody-has-this-name/m") == 66
    assert "--models-dir: ~nobody-has-this-name/m: there is no user" in capfd.readouterr().err


def test_config_of_environment_is_read_with_models_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The config may contain keys and limits."""
    config = tmp_path / "c.yaml"
    config.write_text("max_loaded: none\n")
    monkeypatch.setenv("LLAMASUP_CONFIG", str(config))
    assert serve(str(tmp_path)) == 78
    assert f"{config}:1: max_loaded" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("own", "given", "ctx_size"),
    [({}, {"ctx_size": 256}, 256), ({"ctx_size": 512}, {"ctx_size": 256}, 256), ({"ctx_size": 512}, {}, 512)],
)
def test_option_of_a_model_replaces_the_default_of_the_config(
    own: dict[str, int], given: dict[str, int], ctx_size: int
) -> None:
    config = Config(defaults=ModelSettings(parallel=3, **own))  # type: ignore[arg-type]
    changed = with_overrides(config, (), watch=False, token_file=None, defaults=given)
    assert (changed.defaults.ctx_size, changed.defaults.parallel) == (ctx_size, 3)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--parallel", "0", "0 is less than 1"),
        ("--threads", "5000", "5000 is more than 4096"),
        ("--flash-attn", "maybe", "'maybe' is not on, off or auto"),
    ],
)
def test_wrong_default_for_all_models_is_refused(option: str, value: str, said: str) -> None:
    done = run_to_end("serve", option, value)
    assert done.returncode == 2
    assert said in done.stderr
