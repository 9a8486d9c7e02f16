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


BROKEN, MISSING, HUGE = "path: broken.gguf", "path: gone.gguf", "path: sound.gguf, ctx_size: 100000000"
MISSPELT = "path: sound.gguf, extra: [--nonsense]"


@pytest.mark.parametrize(
    ("models", "exit_code"),
    [([BROKEN], 65), ([MISSING, MISSING], 66), ([HUGE], 71), ([HUGE, BROKEN], 78), ([MISSPELT], 78)],
)
def test_a_start_ends_with_the_code_of_all_that_is_wrong_and_a_reload_with_the_configs(
    tmp_path: Path, tiny_model: Path, models: list[str], exit_code: int
) -> None:
    (tmp_path / "sound.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    config = tmp_path / "c.yaml"
    said = "".join(f"  m{number}: {{{each}}}\n" for number, each in enumerate(models))
    config.write_text(f"runtime: {install(tmp_path / 'llama-server')}\nmodels:\n{said}")
    source = ConfigSource(serve_options(lambda: load(config, os.environ), config_file=config), os.environ)

    with pytest.raises(ConfigInvalid) as at_start:
        source.check_all(source.first())
    assert at_start.value.exit_code == exit_code
    assert f"{config}:3: models.m0" in at_start.value.details[0]
    with pytest.raises(ConfigInvalid) as at_reload:
        source.check(source.read(), {})
    assert at_reload.value.exit_code == 78
