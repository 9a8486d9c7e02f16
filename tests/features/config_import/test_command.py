"""``llamasup config import``: which format a file has, the store of Ollama, output and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llamasup.cli.commands.config import check
from llamasup.features.config_import.command import import_config
from tests.kit.fake_server import install
from tests.kit.models import tiny_decoder

SWAP = "# a config\nmodels:\n  tiny: {cmd: 'llama-server -m tiny.gguf --port ${PORT} -c 512'}\n"
PRESET = "; a preset\n[tiny]\nmodel = tiny.gguf\nc = 512\n"
MODELFILE = "# a Modelfile\nFROM tiny.gguf\nPARAMETER num_ctx 512\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("LLAMASUP_", "XDG_", "HF_", "LLAMA_", "OLLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLAMASUP_RUNTIME", str(install(tmp_path / "llama-server")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(tiny_decoder())
    return tmp_path


def store(folder: Path, name: str, layers: dict[str, bytes]) -> None:
    """Write a model as Ollama does."""
    (folder / "blobs").mkdir(parents=True)
    for number, content in enumerate(layers.values()):
        (folder / "blobs" / f"sha256-{number}").write_bytes(content)
    listed = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{number}"}
        for number, kind in enumerate(layers)
    ]
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": listed}))


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("swap.yaml", SWAP, "tiny"),
        ("models.ini", PRESET, "tiny"),
        ("models.ini", f"version = 1\n{PRESET}", "tiny"),
        ("Modelfile", MODELFILE, "mario"),
        ("luigi.modelfile", MODELFILE, "luigi"),
    ],
)
def test_each_format_becomes_a_config_that_the_check_accepts(
    home: Path, capfd: pytest.CaptureFixture[str], file: str, text: str, name: str
) -> None:
    (home / "mario").mkdir()
    (home / "mario" / file).write_text(text)
    assert import_config(f"mario/{file}", home / "config.yaml") == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert f"Translated 1 model. Read the comments.\n  → Check its files: llamasup config check {home}" in err
    assert f"{name}:\n" in (home / "config.yaml").read_text()
    assert check(home / "config.yaml") == 0, capfd.readouterr().err


def test_result_goes_to_standard_output_and_replaces_no_file(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "swap.yaml").write_text(SWAP)
    assert import_config(str(home / "swap.yaml")) == 0
    text = capfd.readouterr().out
    assert text.startswith(f"# From {home}/swap.yaml, by llamasup config import.")
    assert import_config("~/swap.yaml", home / "tiny.gguf") == 2
    assert "already exists" in capfd.readouterr().err
    assert import_config("swap.yaml", home / "swap.yaml", force=True) == 0
    assert (home / "swap.yaml").read_text().partition("\n")[2] == text.partition("\n")[2]


def test_model_of_ollama_is_found_by_its_name(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"model": tiny_decoder(), "params": b'{"num_ctx": 512}', "system": b"Be kind."}
    store(home / ".ollama/models", "registry.ollama.ai/library/tiny/latest", layers)
    store(home / "elsewhere", "hf.co/org/tiny/Q4", {"model": tiny_decoder()})
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    (home / "Modelfile").write_text("FROM tiny\nSYSTEM Be short.\n")
    for source, blob in (
        ("tiny", ".ollama/models"),
        ("hf.co/org/tiny:Q4", "elsewhere"),
        ("Modelfile", ".ollama"),
    ):
        assert import_config(source, home / "config.yaml", force=True) == 0
        text = (home / "config.yaml").read_text()
        assert f"path: {home}/{blob}" in text, text
        assert check(home / "config.yaml") == 0, capfd.readouterr().err
    assert "system: Be short." in text
    assert "ctx_size: 512" in text


@pytest.mark.parametrize("source", ["missing.yaml", "../..", "a//b", "", "x\0y", "~nobody/x", "a:b:c"])
def test_unknown_sources_are_an_error(home: Path, capfd: pytest.CaptureFixture[str], source: str) -> None:
    assert import_config(source) == 78
    assert "Ollama's store has no such model" in capfd.readouterr().err


def test_broken_store_and_large_files_are_errors(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store(home / ".ollama/models", "registry.ollama.ai/library/tiny/latest", {"params": b"no JSON"})
    assert import_config("tiny") == 78
    assert "cannot be read" in capfd.readouterr().err
    (home / "large.yaml").write_text("#" * (1 << 20) + "\n")
    assert import_config("large.yaml") == 78
    assert "1048577 bytes" in capfd.readouterr().err


def test_config_without_models_is_not_complete(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "empty.yaml").write_text("models: {}\n")
    assert import_config("empty.yaml") == 1
    assert "Not complete: the file is empty" in capfd.readouterr().err
