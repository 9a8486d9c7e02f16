from __future__ import annotations

import os
from pathlib import Path

import pytest

import llamasup
from llamasup.core.config import load
from llamasup.core.config.reading import read
from llamasup.errors import ConfigInvalid, UsageInvalid
from llamasup.fleet.front import as_front
from llamasup.service.config_check import environment_issues
from llamasup.service.serve import serve_options
from tests.kit.async_tests import async_test

CONFIG = """
models:
  tiny: {path: tiny.gguf, aliases: [gpt-tiny]}
  "t*": {threads: 1}
fleet: {directory: "http://127.0.0.1:1", key_file: fleet.key}
"""


def config_in(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(CONFIG)
    return path


def write_secret(folder: Path) -> None:
    (folder / "fleet.key").write_text("s" * 40)
    (folder / "fleet.key").chmod(0o600)


@async_test
async def test_front_serves_no_model_itself_and_knows_those_of_the_config_at_once(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    write_secret(tmp_path)
    options = as_front(
        serve_options(lambda: load(path, os.environ), config_file=path, adjust=lambda config: config), {}
    )
    assert options.initial_config is not None
    assert options.adjust is not None
    for config in (options.initial_config, options.config(), options.adjust(load(path, os.environ))):
        assert config.models == {}
    assert options.membership is not None
    (model,) = options.membership().expected()
    assert (model.id, model.aliases) == ("tiny", ("gpt-tiny",))


def test_front_without_the_secret_does_not_start(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    options = serve_options(lambda: load(path, os.environ), config_file=path)
    with pytest.raises(ConfigInvalid, match="no secret of the fleet"):
        as_front(options, {})


def test_front_with_models_of_its_own_is_refused(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    options = serve_options(lambda: load(path, os.environ), config_file=path)
    with pytest.raises(UsageInvalid, match="only the models of the fleet"):
        as_front(options, {}, has_own_models=True)


def test_service_of_a_program_is_a_front_too(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    write_secret(tmp_path)
    serving = llamasup.serve(config=path)
    options = serving._serve_options(serving._given)
    assert options.membership is not None
    assert options.config().models == {}
    with pytest.raises(UsageInvalid, match="only the models of the fleet"):
        serving = llamasup.serve(config=path, models_dir=tmp_path)
        serving._serve_options(serving._given)


def test_check_of_a_front_needs_no_model_file(tmp_path: Path) -> None:
    reading, issues = read(config_in(tmp_path), {})
    assert not issues
    found = environment_issues(reading, {})
    assert not [issue for issue in found if issue.key.startswith("models")]
