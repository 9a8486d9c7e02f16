"""How ``serve`` reads its config: at the start, and again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from llamasup.api.given import Given
from llamasup.config import Config, load
from llamasup.core.errors import ConfigInvalid
from llamasup.serving import ConfigSource, serve_options
from llamasup.testing.fake_server import install


def test_a_config_from_a_pipe_is_read_once_and_a_reload_says_so(tmp_path: Path) -> None:
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    text = f"runtime: {install(tmp_path / 'llama-server')}\nmax_loaded: 3\nmodels_dir: {tmp_path}\n"
    writing = threading.Thread(target=pipe.write_text, args=(text,))
    writing.start()

    options = serve_options(lambda: load(pipe, os.environ), config_file=pipe)
    writing.join()
    source = ConfigSource(options, os.environ)
    assert source.first().config.max_loaded == 3
    with pytest.raises(ConfigInvalid, match="cannot be read again: it is no file"):
        source.read()


def test_folders_given_beside_a_config_need_no_models_in_it(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("max_loaded: 3\ndefault_model: a\n")
    with pytest.raises(ConfigInvalid):
        load(config, {})

    given = Given(config, (tmp_path / "m",), {}, {})
    assert given() == Config(max_loaded=3, default_model="a", models_dir=(tmp_path / "m",))
