"""How ``serve`` reads its config at the start and at a reload."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from llamasup.api.inputs import ConfigInputs
from llamasup.core.config.config_keys import Config
from llamasup.core.llama_server.inspect import Runtime, find_runtime
from llamasup.errors import ConfigInvalid, RuntimeMissing
from llamasup.fleet.membership import as_front
from llamasup.service import config_source, model_check
from llamasup.service.config_source import ConfigSource
from llamasup.service.serve import ServeOptions
from tests.kit.configs import load
from tests.kit.fake_server import install


def test_config_from_a_pipe_is_read_once_and_reload_is_rejected(tmp_path: Path) -> None:
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    text = f"runtime: {install(tmp_path / 'llama-server')}\nmax_loaded: 3\nmodels_dir: {tmp_path}\n"
    writing = threading.Thread(target=pipe.write_text, args=(text,))
    writing.start()

    options = ServeOptions.of(lambda: load(pipe, os.environ), config_file=pipe)
    writing.join()
    source = ConfigSource(options, os.environ)
    assert source.first().config.max_loaded == 3
    with pytest.raises(ConfigInvalid, match="cannot be read again: it is not a regular file"):
        source.read()


def test_watched_link_is_resolved_unless_another_runtime_comes_first(tmp_path: Path) -> None:
    target, link, config = install(tmp_path / "old"), tmp_path / "link", tmp_path / "c.yaml"
    link.symlink_to(target)
    config.write_text(f"runtime: {{path: {link}, watch: true}}\nmodels_dir: {tmp_path}\n")
    watched = ConfigSource(ServeOptions.of(lambda: load(config, {})), os.environ)
    assert (watched.watched_runtime, watched.first().options.runtime) == (str(link), str(target))
    for given in (
        ConfigSource(ServeOptions.of(lambda: load(config, {}), runtime=str(link)), os.environ),
        ConfigSource(
            ServeOptions.of(lambda: load(config, {})), {**os.environ, "LLAMASUP_RUNTIME": str(link)}
        ),
    ):
        assert (given.watched_runtime, given.first().options.runtime) == (None, str(link))
    link.unlink()
    with pytest.raises(RuntimeMissing, match=str(link)):
        ConfigSource(ServeOptions.of(lambda: load(config, {})), os.environ)


def test_config_with_only_other_nodes_needs_no_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.yaml"
    peers = "peers: {attic: {url: 'http://127.0.0.1:1'}}\n"
    config.write_text(peers)
    runtimes = Runtimes()
    monkeypatch.setattr(config_source, "find_runtime", runtimes.find)
    source = ConfigSource(ServeOptions.of(lambda: load(config, {})), {})
    first = source.first()
    assert first.options.runtime is None
    assert list(source.rejected(first)) == []
    config.write_text(f"{peers}models_dir: {tmp_path}\n")
    with pytest.raises(RuntimeMissing):
        source.read()  # the reload is rejected, and the other nodes are served further
    runtimes.installed = str(install(tmp_path / "llama-server"))
    assert source.read().options.runtime == runtimes.installed


@pytest.mark.parametrize(
    ("given", "environ"), [({"runtime": "llama"}, {}), ({}, {"LLAMASUP_RUNTIME": "llama"})]
)
def test_named_runtime_must_be_there(
    given: dict[str, str], environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("peers: {attic: {url: 'http://127.0.0.1:1'}}\n")
    monkeypatch.setattr(config_source, "find_runtime", Runtimes().find)
    with pytest.raises(RuntimeMissing):
        ConfigSource(ServeOptions.of(lambda: load(config, {}), **given), environ)


def test_front_of_a_fleet_needs_no_runtime_that_is_named_for_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.yaml"
    secret = "s" * 40
    config.write_text(
        "models: {m: {path: /srv/m.gguf}}\nruntime: /srv/llama\nfleet: {directory: 'http://head:8000'}"
    )
    environ = {"LLAMASUP_RUNTIME": "/srv/llama", "LLAMASUP_FLEET_SECRET": secret}
    monkeypatch.setattr(config_source, "find_runtime", Runtimes().find)
    front = as_front(ServeOptions.of(lambda: load(config, {})), environ)
    assert ConfigSource(front, environ).first().options.runtime is None


class Runtimes:
    """Of a machine without a llama-server, until one is ``installed``."""

    installed: str | None = None

    def find(self, choice: str | None, environ: Mapping[str, str], configured: str | None) -> Runtime:
        if self.installed is None:
            raise RuntimeMissing("no llama-server")
        return find_runtime(self.installed, environ, configured)


def test_folders_on_the_command_line_need_no_models_in_the_config(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("max_loaded: 3\ndefault_model: a\n")
    with pytest.raises(ConfigInvalid):
        load(config, {})

    given = ConfigInputs(config, (tmp_path / "m",), {}, {})
    read = structs.replace(given(), lines={}, features={})
    assert read == Config(max_loaded=3, default_model="a", models_dir=(tmp_path / "m",))


BROKEN, MISSING = "path: broken.gguf", "path: gone.gguf"
HUGE = "path: sound.gguf, extra: [-c, '2000000000']"
MISSPELT = "path: sound.gguf, extra: [--nonsense]"


@pytest.mark.parametrize(
    ("models", "exit_code"),
    [([BROKEN], 65), ([MISSING, MISSING], 66), ([HUGE], 71), ([HUGE, BROKEN], 78), ([MISSPELT], 78)],
)
def test_start_uses_the_common_exit_code_and_reload_that_of_config(
    tmp_path: Path, tiny_model: Path, models: list[str], exit_code: int
) -> None:
    (tmp_path / "sound.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    config = tmp_path / "c.yaml"
    said = "".join(f"  m{number}: {{{each}}}\n" for number, each in enumerate(models))
    config.write_text(f"runtime: {install(tmp_path / 'llama-server')}\nmodels:\n{said}")
    source = ConfigSource(ServeOptions.of(lambda: load(config, os.environ), config_file=config), os.environ)

    with pytest.raises(ConfigInvalid) as at_start:
        source.check_all(source.first())
    assert at_start.value.exit_code == exit_code
    assert f"{config}:3: models.m0" in at_start.value.details[0]
    with pytest.raises(ConfigInvalid) as at_reload:
        source.check(source.read(), {})
    assert at_reload.value.exit_code == 78


def test_reload_rejects_second_pinned_model_of_a_group_like_a_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two changed, or only the group."""
    monkeypatch.setattr(model_check, "devices", lambda needs: ("CUDA0",))
    (tmp_path / "m.gguf").write_bytes(tiny_model.read_bytes())
    config = tmp_path / "c.yaml"

    def write(group: str, pinned: str) -> None:
        models = "".join(
            f"  {name}: {{path: m.gguf, threads: {number + 1}, pin: {str(name in pinned).lower()}}}\n"
            for number, name in enumerate("ab")
        )
        text = f"runtime: {install(tmp_path / 'llama-server')}\ngroups: {{g: [{group}]}}\nmodels:\n{models}"
        config.write_text(text)

    write("a, b", "a")
    source = ConfigSource(ServeOptions.of(lambda: load(config, os.environ), config_file=config), os.environ)
    first = source.read().inventory.registry.specs
    write("a, b", "ab")
    with pytest.raises(ConfigInvalid):
        source.check(source.read(), first)
    write("a", "ab")
    apart = source.read().inventory.registry.specs
    source.check(source.read(), first)
    write("a, b", "ab")
    with pytest.raises(ConfigInvalid):
        source.check(source.read(), apart)


def test_reload_rejects_less_memory_but_not_a_missing_file(tmp_path: Path, tiny_model: Path) -> None:
    """The model has no settings, so only the change of this reload counts."""
    model, config = tmp_path / "m.gguf", tmp_path / "c.yaml"
    model.write_bytes(tiny_model.read_bytes())
    text = f"runtime: {install(tmp_path / 'llama-server')}\nmodels: {{m: {{path: m.gguf, ctx_size: 512}}}}\n"
    config.write_text(f"{text}memory: {{ram: 1GiB}}\n")
    source = ConfigSource(ServeOptions.of(lambda: load(config, os.environ), config_file=config), os.environ)
    before = source.read().inventory.registry.specs
    config.write_text(f"{text}memory: {{ram: 1MiB}}\n")
    source.check(source.read(), before)
    with pytest.raises(ConfigInvalid):
        source.check(source.read(), before, less_memory=True)
    model.unlink()
    source.check(source.read(), before, less_memory=True)
