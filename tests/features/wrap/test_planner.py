"""Parsing a command line by the program's help; the programs are scripts that answer like a build."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.http.address import UnixAddress
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.errors import BrokenRuntime, RuntimeMissing, UnsafeBind, UsageInvalid
from llamasup.features.wrap.options import WrapOptions
from llamasup.features.wrap.planner import WrappedPlanner, parse_command
from tests.kit.paths import FIXTURES

HELP = FIXTURES / "help" / "b11434.txt"


@pytest.fixture
def server(tmp_path: Path) -> str:
    return script(tmp_path / "llama-server", f'[ "$1" = --help ] && exec cat {HELP}', "echo version: 7 >&2")


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


def test_each_generation_has_its_own_address(server: str, tmp_path: Path) -> None:
    wrapping = parse_command([server, "-m", "m.gguf", "--port", "1"], os.environ)
    assert wrapping.capabilities.version == "7"
    planner = WrappedPlanner(wrapping, tmp_path)
    for generation in (1, 2):
        made = planner.plan(generation)
        path = str(tmp_path / f"{generation}.sock")
        assert made.argv == (server, "-m", "m.gguf", "--host", path)
        assert (made.address, made.api_key) == (UnixAddress(path), None)
    # llamasup never reduces the user's own command line.
    oom = Diagnosis("out_of_memory_host", "", "", (), True, 71)
    assert planner.step_down(made, oom) is None


@pytest.mark.parametrize(
    ("words", "probe_class"),
    [
        (["-m", "tiny.gguf"], ModelClass.DECODER),
        (["-m", "tiny.gguf", "--embedding"], ModelClass.ENCODER),
        (["-m", "missing.gguf"], None),
        (["-m", "tiny.gguf", "-hf", "org/repo"], None),
        (["--models-dir", "."], None),
    ],
)
def test_warm_up_follows_the_model_class(
    server: str,
    tiny_model: Path,
    words: list[str],
    probe_class: ModelClass | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    wrapping = parse_command([server, *words], os.environ)
    assert wrapping.probe_class is probe_class
    assert WrapOptions(wrapping).policy.warm_up is (probe_class is not None)
    assert not WrapOptions(wrapping, warm_up=False).policy.warm_up


@pytest.mark.parametrize(
    ("asked", "timeout_s", "waits"), [(False, 9, False), (True, 9, True), (True, 0, False)]
)
def test_requests_wait_for_first_load_only_with_a_wait_timeout(
    server: str, asked: bool, timeout_s: float, waits: bool
) -> None:
    wrapping = parse_command([server], os.environ)
    options = WrapOptions(wrapping, waits_for_first_load=asked, wait_timeout_s=timeout_s)
    assert options.policy.waits_for_first_load is waits
    with socket.socket() as given:
        by_systemd = WrapOptions(wrapping, wait_timeout_s=timeout_s, sockets=(given,))
        assert by_systemd.policy.waits_for_first_load is (timeout_s > 0)


@pytest.mark.parametrize(
    ("keys", "usable", "known"),
    [("k1\n k2 \n", "k1", 2), (" k2 \n", None, 1), ("k3\r\n", None, 1), (None, None, 0)],
)
def test_key_that_no_header_can_carry_is_not_used(
    server: str, tiny_model: Path, tmp_path: Path, keys: str | None, usable: str | None, known: int
) -> None:
    """llama-server keeps the blanks in the lines of its key file (b11434)."""
    path = tmp_path / "keys"
    if keys is not None:
        path.write_bytes(keys.encode())
    wrapping = parse_command([server, "-m", str(tiny_model), "--api-key-file", str(path)], os.environ)
    assert len(wrapping.api_keys) == known
    assert wrapping.usable_key == usable
    assert (wrapping.probe_class is None) == (usable is None)


def test_capabilities_are_found_despite_an_invalid_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = script(
        tmp_path / "llama-server",
        '[ "$XDG_CONFIG_HOME" = /bad ] && { echo "I using config file: /bad/c.ini"; echo stoi; exit 1; }',
        f"exec cat {HELP}",
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", "/bad")
    assert parse_command([server, "--port", "5"], os.environ).line.port == 5


def test_errors_for_no_command_no_program_and_no_llama_server_differ(tmp_path: Path) -> None:
    with pytest.raises(UsageInvalid):
        parse_command([], os.environ)
    with pytest.raises(RuntimeMissing):
        parse_command([str(tmp_path / "missing")], os.environ)
    with pytest.raises(BrokenRuntime, match="exit code 4") as caught:
        parse_command([script(tmp_path / "x", "echo last words", "exit 4")], os.environ)
    assert caught.value.lines == ("last words",)
    (tmp_path / "y").write_text("x")
    with pytest.raises(BrokenRuntime, match="Permission denied"):
        parse_command([str(tmp_path / "y")], os.environ)


@pytest.mark.check("X7", "exit code 2")
@pytest.mark.parametrize("prefix", ["/a.b", "/(a|b)", "/a+", "/a/"])
def test_strict_rejects_a_prefix_that_matches_other_paths(server: str, tiny_model: Path, prefix: str) -> None:
    wrapping = parse_command([server, "-m", str(tiny_model), "--api-prefix", prefix], os.environ)
    with pytest.raises(UsageInvalid, match="regular expression") as refused:
        WrapOptions(wrapping, strict=True).spec(os.environ)
    assert refused.value.exit_code == 2
    WrapOptions(wrapping).spec(os.environ)


def test_empty_key_file_does_not_count_as_keys(server: str, tiny_model: Path, tmp_path: Path) -> None:
    """llama-server starts without keys then, so --strict must not take it for a lock (X1)."""
    keys = tmp_path / "keys"
    keys.write_text("# none yet\n")
    words = [server, "-m", str(tiny_model), "--host", "0.0.0.0", "--api-key-file", str(keys)]
    wrapping = parse_command(words, os.environ)
    assert wrapping.probe_class is ModelClass.DECODER
    with pytest.raises(UnsafeBind) as refused:
        WrapOptions(wrapping, strict=True).spec(os.environ)
    # $LLAMASUP_API_KEY does not apply to a wrapped server.
    assert refused.value.remedy.startswith("Give llama-server a key with --api-key-file, or")
    keys.write_text("k\n")
    WrapOptions(parse_command(words, os.environ), strict=True).spec(os.environ)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes")
def test_key_pipe_is_not_read(server: str, tiny_model: Path, tmp_path: Path) -> None:
    """Only the first reader of a pipe gets the keys, which must be llama-server."""
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    wrapping = parse_command([server, "-m", str(tiny_model), "--api-key-file", str(pipe)], os.environ)
    assert (wrapping.api_keys, wrapping.has_keys, wrapping.probe_class) == ((), True, None)
