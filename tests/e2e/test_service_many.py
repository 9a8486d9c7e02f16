"""``llamasup service`` of many models: the unit for a config, and refused configs.

The unit under a real systemd is in tests/features/systemd.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import NamedTemporaryFile

import pytest

from tests.e2e.driver import run_to_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux")

RUNTIME = ("--runtime", "embedded")


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """The folder of a config, with a folder of two models, readable by all users."""
    tmp_path.chmod(0o755)
    (tmp_path / "models").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"models/{name}.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "one.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "keys").write_text(f"{'k' * 40}\n")
    (tmp_path / "keys").chmod(0o600)
    return tmp_path


def printed(folder: Path, config: str, *words: str, **environ: str) -> CompletedProcess[str]:
    path = folder / "served.yaml"
    path.write_text(config)
    env = {**os.environ, **environ}
    return run_to_end("service", "print", "--config", str(path), *RUNTIME, *words, env=env)


def settings(unit: CompletedProcess[str], name: str) -> list[str]:
    assert unit.returncode == 0, unit.stderr
    return [line.partition("=")[2] for line in unit.stdout.splitlines() if line.startswith(f"{name}=")]


def test_sandbox_contains_the_paths_of_the_config(folder: Path) -> None:
    unit = printed(
        folder,
        "models_dir: models\n"
        "models: {mine: {path: one.gguf, drain_timeout: 10m}, a: {ttl: 5m}}\n"
        "auth: {api_key_file: keys}\n",
        "--watch",
    )
    (start,) = settings(unit, "ExecStart")
    assert start.endswith(
        f"llamasup serve --config {folder}/served.yaml --watch --runtime embedded"
        " --api-key-file %d/api-key-file"
    )
    assert settings(unit, "LoadCredential") == [f"api-key-file:{folder}/keys"]
    # The folder of the config: an editor puts another file in the old one's place.
    assert f'"-{folder}"' in settings(unit, "BindReadOnlyPaths")
    assert settings(unit, "IPAddressDeny") == ["any"]
    assert settings(unit, "TimeoutStopSec") == ["625"]
    assert settings(unit, "BindPaths") == settings(unit, "ReadWritePaths") == []
    assert "llamasup-serve.service" in unit.stdout


def test_options_that_serve_has_replace_those_of_the_config(folder: Path) -> None:
    options = ["--no-usage", "--no-ui", "--log-level", "debug", "--port", "1234"]
    (start,) = settings(printed(folder, "models_dir: models", *options), "ExecStart")
    words = start.split()
    assert {"--no-usage", "--no-ui"} <= {*words}
    assert words[words.index("--port") + 1] == "1234"
    assert words[words.index("--log-level") + 1] == "debug"


def test_files_outside_the_config_folder_are_made_visible_one_by_one(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    away = tmp_path_factory.mktemp("away")
    for name in ("big.gguf", "chat.jinja", "letter"):
        (away / name).write_bytes((folder / "one.gguf").read_bytes())
    unit = printed(
        folder,
        f"models: {{big: {{path: {away}/big.gguf, extra: [--chat-template-file, {away}/chat.jinja]}}}}",
        *("--models-dir", str(folder / "models"), "--name", "two"),
    )
    shown = {path.strip('"-') for path in settings(unit, "BindReadOnlyPaths")}
    assert {str(folder), f"{away}/big.gguf", f"{away}/chat.jinja"} <= shown
    assert str(away) not in shown
    assert f"--models-dir {folder}/models" in settings(unit, "ExecStart")[0]
    assert "llamasup-two.service" in unit.stdout


def test_downloads_give_the_unit_network_access_and_a_writable_folder(folder: Path) -> None:
    (folder / "fetched").mkdir()
    for config in (
        "downloads: {on_demand: true, folder: fetched}",
        "models: {x: {repo: org/x}}\ndownloads: {folder: fetched}",
    ):
        unit = printed(folder, config, "--run-as", "daemon")
        assert settings(unit, "IPAddressDeny") == []
        assert settings(unit, "BindPaths") == [f'"-{folder}/fetched"']
        assert settings(unit, "User") == ["daemon"]
        # The user of a service alone may write nowhere but in its own folders.
        refused = printed(folder, config)
        assert refused.returncode == 78
        assert f"{folder}/fetched has mode 0755" in refused.stderr
        assert "/var/lib/llamasup/serve" in refused.stderr
    own = printed(folder, "downloads: {on_demand: true, folder: ~/models}\nhttp: {access_log: ~/log}")
    assert settings(own, "BindPaths") == settings(own, "ReadWritePaths") == []


def test_user_service_reads_its_files_directly(folder: Path) -> None:
    config = f"models_dir: ~/models\nauth: {{api_key_file: {folder}/keys}}\nhttp: {{access_log: ~/log}}"
    unit = printed(folder, config, "--user", HOME=str(folder))
    assert settings(unit, "LoadCredential") == []
    assert "--api-key-file" not in settings(unit, "ExecStart")[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "--config", "x.yaml"], "MODEL and --config exclude each other"),
        (["demo", "--models-dir", "models"], "MODEL and --models-dir exclude each other"),
        (["demo", "--watch"], "MODEL and --watch exclude each other"),
        ([], "Nothing to serve"),
        (["--watch"], "Nothing to serve"),
        (["--config", "x.yaml", "--ctx-size", "512"], "--ctx-size needs MODEL"),
        (["--config", "x.yaml", "--access-log", "-"], "--access-log needs MODEL"),
        (["--config", "x.yaml", "--run-as", "no such user"], "There is no user"),
        (["--config", "x.yaml", "--name", "a/b"], "not a valid name for a service"),
    ],
)
def test_invalid_options_are_usage_errors(words: list[str], said: str) -> None:
    done = run_to_end("service", "print", *words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("config", "words", "code", "said"),
    [
        ("models_dir: models\nlisten: 127.0.0.1:80", [], 2, "--port 80 needs a privilege"),
        ("models_dir: models\nlisten: 0.0.0.0:8080", [], 78, "no API key is set"),
        ("models: {a: {ctxsize: 5}}", [], 78, "unknown key; did you mean ctx_size?"),
        ("models: {x: {path: nothing.gguf}}", [], 78, "No such file or directory"),
        ("models_dir: models\nmodels: {x: {}}", [], 66, "no model 'x'"),
        ("models: {x: {path: keys}}", [], 65, "keys"),
        ("caches: huggingface", [], 78, "these folders are in your home"),
        ("models_dir: ~/models", [], 78, "/var/lib/llamasup/serve/models"),
        ("models_dir: ${MODELS}", [], 78, "MODELS"),
        ("downloads: {on_demand: true, folder: nowhere}", [], 78, "does not exist"),
        ("models_dir: models\nhttp: {access_log: a.log}", [], 78, "The access log"),
        ("models_dir: models\nlisten: x.sock", [], 78, "The socket"),
        ("models_dir: models", ["--models-dir", "MISSING"], 78, "MISSING: No such file"),
    ],
)
def test_service_that_could_not_serve_is_not_installed(
    folder: Path, tmp_path: Path, config: str, words: list[str], code: int, said: str
) -> None:
    """A service does not have the variable ``${MODELS}`` of the user who installs it."""
    missing = str(tmp_path / "missing")
    words = [missing if word == "MISSING" else word for word in words]
    done = printed(folder, config, *words, MODELS=str(folder / "models"))
    assert done.returncode == code, done.stderr
    assert said.replace("MISSING", missing) in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_all_problems_of_a_config_and_its_models_are_reported_at_once(folder: Path) -> None:
    (folder / "one.gguf").chmod(0o600)
    (folder / "models/b.gguf").write_bytes(b"GGUF" + bytes(60))
    config = "models_dir: models\nmodels: {one: {path: one.gguf}, b: {ttl: 5m}, three: {ttl: 5m}}\n"
    for more, also in (
        ("caches: [huggingface]\n", ("caches: huggingface", "three", "b.gguf", "one.gguf has mode 0600")),
        (
            "http: {access_log: /nowhere/a.log}\ndefaults: {ctx_size: many}\n",
            ("/nowhere", "defaults.ctx_size"),
        ),
    ):
        done = printed(folder, config + more, "--port", "80", "--name", "a b", "--host", "0.0.0.0")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        for said in ("'a b' is not", "--port 80 needs", *also):
            assert said in done.stderr, done.stderr
        assert ("no API key is set" in done.stderr) is ("caches" in more)  # a broken config may have a key


def test_config_directly_in_a_home_is_refused() -> None:
    with NamedTemporaryFile("w", dir="/tmp", suffix=".yaml") as config:
        config.write("models: {demo: {path: demo}}")
        config.flush()
        done = run_to_end("service", "print", "--config", config.name, *RUNTIME)
    assert done.returncode == 78
    assert "get access to all files of that folder" in done.stderr


def test_config_unreadable_for_the_service_user_is_refused(folder: Path) -> None:
    assert printed(folder, "models_dir: models").returncode == 0
    (folder / "served.yaml").chmod(0o600)
    done = printed(folder, "models_dir: models")
    assert done.returncode == 78
    assert "served.yaml has mode 0600" in done.stderr
    assert printed(folder, "models_dir: models", "--run-as", "root").returncode == 0
