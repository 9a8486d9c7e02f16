"""examples/tauri: its configuration by Tauri's schema, and the tests of its crate that starts llamasup.

The application itself needs WebKit, so it is not built here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from packaging.version import Version

from tests.paths import ROOT
from tests.patience import PATIENCE_S

EXAMPLE = ROOT / "examples" / "tauri"
BUILD_S = 400.0
"""Bounds a build that hangs: on two free cores it takes 8 s."""


def configuration() -> Any:
    return json.loads((EXAMPLE / "src-tauri" / "tauri.conf.json").read_text("utf-8"))


def run(*words: str, cwd: Path, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd)


@pytest.fixture(scope="session")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the version of Tauri that the example uses."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing")
    package = json.loads((EXAMPLE / "package.json").read_text("utf-8"))
    folder = tmp_path_factory.mktemp("tauri-cli")
    name = f"@tauri-apps/cli@{package['devDependencies']['@tauri-apps/cli']}"
    done = run("npm", "pack", "--prefer-offline", "--silent", name, cwd=folder)
    if done.returncode != 0:
        pytest.skip(f"npm cannot fetch {name}: {done.stderr}")
    with tarfile.open(folder / done.stdout.strip()) as archive:
        file = archive.extractfile("package/config.schema.json")
        assert file is not None
        return json.load(file)


def test_configuration_is_valid_for_tauri(schema: Any) -> None:
    jsonschema.validate(configuration(), schema)
    wrong = configuration()
    wrong["bundle"]["externalBinaries"] = wrong["bundle"].pop("externalBin")
    with pytest.raises(jsonschema.ValidationError, match="externalBinaries"):
        jsonschema.validate(wrong, schema)


def test_configuration_packages_the_bundle_and_a_llama_server_of_the_target() -> None:
    bundle = configuration()["bundle"]
    ((source, target),) = bundle["resources"].items()
    assert (EXAMPLE / "src-tauri" / source).resolve() == ROOT / "dist" / "llamasup-without-embedded"
    (program,) = bundle["externalBin"]
    main = (EXAMPLE / "src-tauri" / "src" / "main.rs").read_text("utf-8")
    assert f'join("{target.rstrip("/")}")' in main  # where it looks for them
    assert f'"{Path(program).name}{{suffix}}"' in main


def test_scripts_of_the_page_can_be_parsed() -> None:
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    done = run("node", "--check", str(EXAMPLE / "ui" / "page.js"), cwd=EXAMPLE)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def crate() -> Path:
    """The folder of the crate, whose tests are built."""
    for program in ("cargo", "cc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing")
    folder = EXAMPLE / "sidecar"
    wanted = tomllib.loads((folder / "Cargo.toml").read_text("utf-8"))["package"]["rust-version"]
    found = run("cargo", "--version", cwd=folder).stdout
    if Version(found.split()[1]) < Version(wanted):
        pytest.skip(f"the crate needs Rust {wanted}, and here is {found}")
    fetched = run("cargo", "fetch", "--locked", cwd=folder)
    if fetched.returncode != 0:
        pytest.skip(f"cargo cannot fetch what the crate needs: {fetched.stderr}")
    built = run("cargo", "test", "--locked", "--offline", "--no-run", cwd=folder, timeout_s=BUILD_S)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.real
def test_crate_starts_and_ends_a_real_llamasup(
    runtime: str,
    crate: Path,
    tiny_model: Path,
    program: Path,
    fake_server: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP", str(program))
    monkeypatch.setenv("LLAMASUP_RUNTIME", runtime)
    monkeypatch.setenv("LLAMASUP_TEST_STALLING_RUNTIME", fake_server("stall_after=2"))
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for a server on this machine
    done = run("cargo", "test", "--locked", "--offline", "--test", "sidecar", cwd=crate)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_example_is_in_the_docs() -> None:
    assert "examples/tauri" in (ROOT / "docs" / "sidecar.md").read_text("utf-8")
