from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamasup.config import load
from llamasup.errors import ConfigInvalid
from llamasup.fleet.front import as_front
from llamasup.service.serve import serve_options
from tests.async_tests import async_test

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


@async_test
async def test_front_serves_no_model_itself_and_knows_those_of_the_config_at_once(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    (tmp_path / "fleet.key").write_text("s" * 40)
    (tmp_path / "fleet.key").chmod(0o600)
    options = as_front(
        serve_options(lambda: load(path, os.environ), config_file=path, adjust=lambda config: config),
        "http://127.0.0.1:1",
        {},
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
        as_front(options, "http://127.0.0.1:1", {})
