"""examples/tauri: its configuration by Tauri's schema, and the tests of its crate that starts llamasup.

The application itself needs WebKit, so it is not built here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from packaging.version import Version

from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S

EXAMPLE = ROOT / "examples" / "tauri"
BUILD_S = 400.0
"""Bounds a build that hangs: on two free cores it takes 8 s."""
TESTS_S = 4 * PATIENCE_S
"""Bounds the tests of the crate. Each of them gives up earlier, and then ends what it has started."""
FETCH_ONCE = ("--fetch-retries=0", "--fetch-timeout=60000")
"""Without them, npm tries for minutes where there is no registry."""
DRIVEN_PAGE = """
import { readFileSync } from "node:fs";
import { setImmediate } from "node:timers/promises";
import { runInThisContext } from "node:vm";
const elements = {}, roles = [], html = readFileSync("index.html", "utf8");
globalThis.document = {
  getElementById: (id) => {
    if (!html.includes(`id="${id}"`)) throw new Error(`the page has no ${id}`);
    return (elements[id] ??= Object.assign(new EventTarget(), { textContent: "", value: "" }));
  },
};
const commands = {
  reason_of_end: async () => "it could not be started",
  ask: async ({ messages, texts }) => {
    roles.push(messages.map(({ role }) => role));
    if (roles.length === 1) throw "no answer";
    texts.show("text");
  },
};
class Channel {
  constructor(show) {
    this.show = show;
  }
}
globalThis.window = { __TAURI__: { core: { Channel, invoke: (name, options) => commands[name](options) } } };
runInThisContext(readFileSync("page.js", "utf8"));
while (!elements.answer.textContent) await setImmediate();
for (const asked of ["one", "two", "three"]) {
  elements.question.value = asked;
  elements.form.dispatchEvent(new Event("submit"));
  while (elements.ask.disabled) await setImmediate();
}
console.log(JSON.stringify({ shown: elements.answer.textContent, roles }));
"""
"""The page, with doubles of Tauri and of the document. The first question has no answer."""


def configuration() -> Any:
    return json.loads((EXAMPLE / "src-tauri" / "tauri.conf.json").read_text("utf-8"))


def run(*words: str, cwd: Path, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Also what the program has started has ended when the time is over."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=cwd, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # until nothing has the pipes any more
            raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def fetch(what: str, *words: str, cwd: Path, timeout_s: float = PATIENCE_S) -> str:
    """The output of a program that needs a registry: without one, or with a slow one, the test is skipped."""
    try:
        done = run(*words, cwd=cwd, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{words[0]} has not fetched {what} within {timeout_s} s")
    if done.returncode != 0:
        pytest.skip(f"{words[0]} cannot fetch {what}: {done.stderr}")
    return done.stdout


def rust_version(cwd: Path) -> Version:
    """Skips the test where cargo is only rustup's, which has no toolchain."""
    done = run("cargo", "--version", cwd=cwd)
    if done.returncode != 0:
        pytest.skip(f"cargo does not work: {done.stderr}")
    return Version(done.stdout.split()[1].partition("-")[0])  # 1.95.0-nightly


@pytest.fixture(scope="session")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the version of Tauri that the example uses."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing")
    package = json.loads((EXAMPLE / "package.json").read_text("utf-8"))
    folder = tmp_path_factory.mktemp("tauri-cli")
    name = f"@tauri-apps/cli@{package['devDependencies']['@tauri-apps/cli']}"
    packed = fetch(name, "npm", "pack", *FETCH_ONCE, "--prefer-offline", "--silent", name, cwd=folder)
    with tarfile.open(folder / packed.strip()) as archive:
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
    assert all((EXAMPLE / "src-tauri" / icon).is_file() for icon in bundle["icon"])
    (program,) = bundle["externalBin"]
    main = (EXAMPLE / "src-tauri" / "src" / "main.rs").read_text("utf-8")
    assert f'join("{target.rstrip("/")}")' in main  # where it looks for them
    assert f'"{Path(program).name}{{suffix}}"' in main


def test_page_shows_answers_and_why_llamasup_has_ended(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    page = tmp_path / "page-test.mjs"
    page.write_text(DRIVEN_PAGE)
    done = run("node", str(page), cwd=EXAMPLE / "ui")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["shown"] == "\nit could not be started\n\n> one\nno answer\n> two\ntext\n> three\ntext"
    assert seen["roles"] == [["user"], ["user"], ["user", "assistant", "user"]]


@pytest.fixture(scope="session")
def crate() -> Path:
    """The folder of the crate, whose tests are built."""
    for program in ("cargo", "cc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing")
    folder = EXAMPLE / "sidecar"
    wanted = tomllib.loads((folder / "Cargo.toml").read_text("utf-8"))["package"]["rust-version"]
    if (found := rust_version(folder)) < Version(wanted):
        pytest.skip(f"the crate needs Rust {wanted}, and here is {found}")
    fetch("what the crate needs", "cargo", "fetch", "--locked", cwd=folder)
    built = run("cargo", "test", "--locked", "--offline", "--no-run", cwd=folder, timeout_s=BUILD_S)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def cargo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of cargo."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def put(script: str) -> None:
        program = tmp_path / "cargo"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return put


def test_version_of_a_nightly_rust_is_a_version(cargo: Callable[[str], None], tmp_path: Path) -> None:
    cargo("echo 'cargo 1.95.0-nightly (f2d3ce0bd 2026-03-21)'")
    assert rust_version(tmp_path) == Version("1.95.0")


def test_cargo_without_a_toolchain_skips_the_tests_of_the_crate(
    cargo: Callable[[str], None], tmp_path: Path
) -> None:
    cargo("echo 'no default toolchain is configured' >&2; exit 1")
    with pytest.raises(pytest.skip.Exception, match="no default toolchain"):
        rust_version(tmp_path)


def test_registry_that_fails_skips_the_tests(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="cannot fetch a package: no registry"):
        fetch("a package", "sh", "-c", "echo no registry >&2; exit 1", cwd=tmp_path)


def test_registry_that_hangs_skips_the_tests_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="has not fetched a package"):
        fetch("a package", "sh", "-c", "sleep 3600 & wait", cwd=tmp_path, timeout_s=0.1)


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
    done = run("cargo", "test", "--locked", "--offline", "--test", "sidecar", cwd=crate, timeout_s=TESTS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_example_is_in_the_docs() -> None:
    assert "examples/tauri" in (ROOT / "docs" / "sidecar.md").read_text("utf-8")
