"""Mistakes people make with ``llamasup run``: each a sentence, the right exit code, nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.e2e.driver import llamasup, run_to_end, started
from tests.kit.children import NewChildren


def refused(
    code: int,
    says: str | tuple[str, ...],
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> str:
    """Run, and check everything that holds for every refusal."""
    new_children = NewChildren()
    done = run_to_end(*arguments, prefix=prefix, env={**os.environ, **(env or {})})
    assert done.returncode == code, done.stderr
    for words in (says,) if isinstance(says, str) else says:
        assert words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert new_children() == []
    return done.stderr


@pytest.fixture
def run_tiny(tiny_model: Path, fake_server: Callable[..., str]) -> tuple[str, ...]:
    return ("run", str(tiny_model), "--runtime", fake_server(), "--port", "0")


# --- the model file -------------------------------------------------------------------------------------


def test_missing_file_error_suggests_files_with_similar_names(tiny_model: Path) -> None:
    stderr = refused(66, "tinny.gguf", "run", str(tiny_model.with_name("tinny.gguf")))
    assert "tiny.gguf" in stderr.replace("tinny.gguf", "")


def test_folder_error_lists_the_models_in_it(tiny_model: Path) -> None:
    refused(66, ("folder", "tiny.gguf"), "run", str(tiny_model.parent))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda model: b"", ("empty",)),
        (lambda model: model[:-1000], ("truncated", "675160 of")),
        (lambda model: b"<!DOCTYPE html><html><body>404</body></html>", ("web page",)),
        (lambda model: model[:4] + b"\x09\0\0\0" + model[8:], ("the version at offset 4 is 9",)),
    ],
    ids=["empty", "truncated", "web page", "unknown version"],
)
def test_incomplete_model_file_is_refused(
    content: Callable[[bytes], bytes], says: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content(tiny_model.read_bytes()))
    refused(65, says, "run", str(path))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_unreadable_file_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(tiny_model.read_bytes())
    path.chmod(0)
    # Root reads everything, except without these two capabilities.
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    refused(66, ("secret.gguf", "ermission"), "run", str(path), prefix=plain)


@pytest.mark.parametrize("name", ["two words.gguf", 'it\'s "quoted".gguf', "模型 ✓.gguf", "-weird.gguf"])
def test_model_with_odd_file_name_is_served(
    name: str, tiny_model: Path, tmp_path: Path, fake_server: Callable[..., str]
) -> None:
    path = tmp_path / name
    path.write_bytes(tiny_model.read_bytes())
    with llamasup(path, "--runtime", fake_server()) as running:
        assert running.wait_for("ready")["models"] == [path.stem]
        assert running.stop() == 0


def test_file_name_with_leading_dash_works_after_double_dash(
    tiny_model: Path, tmp_path: Path, fake_server: Callable[..., str]
) -> None:
    (tmp_path / "-weird.gguf").write_bytes(tiny_model.read_bytes())
    done = run_to_end("plan", "--runtime", fake_server(), "--", "-weird.gguf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "-weird.gguf") in done.stdout


@pytest.mark.parametrize(
    ("name", "shown"), [(b"\x1b[31mred.gguf", "\\x1b[31mred.gguf"), (b"caf\xe9.gguf", "caf\\xe9.gguf")]
)
def test_file_name_is_printed_without_control_characters(
    name: bytes, shown: str, tiny_model: Path, tmp_path: Path, fake_server: Callable[..., str]
) -> None:
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(tiny_model.read_bytes())
    done = run_to_end("plan", str(path), "--runtime", fake_server())
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout
    assert "\x1b" not in done.stdout
    path.unlink()
    assert shown in refused(66, "there is no such file", "plan", str(path))


def test_download_from_loopback_address_is_refused() -> None:
    refused(78, "the private address 127.0.0.1", "run", "https://127.0.0.1:9/m.gguf")


# --- the address ----------------------------------------------------------------------------------------


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_error_for_port_in_use_names_its_process(
    port_in_use: int, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    refused(
        71,
        (str(port_in_use), f"pid {os.getpid()}"),
        *("run", str(tiny_model), "--runtime", fake_server(), "--port", str(port_in_use)),
    )


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_privileged_port_is_refused(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    start = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if start < 2:
        pytest.skip("every port is unprivileged here")
    plain = ["setpriv", "--bounding-set=-net_bind_service"] if os.geteuid() == 0 else []
    arguments = ("run", str(tiny_model), "--runtime", fake_server(), "--port", "1")
    refused(71, ("port 1 ", "1023"), *arguments, prefix=plain)


def test_key_file_without_keys_is_refused(run_tiny: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    refused(78, "has no keys", *run_tiny, "--api-key-file", str(tmp_path / "keys"))


# --- the runtime ----------------------------------------------------------------------------------------


def script(folder: Path, text: str) -> str:
    path = folder / "server"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_runtime_without_output_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    refused(69, "nothing", "run", str(tiny_model), "--runtime", script(tmp_path, "exit 0"))


def test_runtime_that_is_a_text_file_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "server"
    path.write_text("hello")
    refused(69, "executable", "run", str(tiny_model), "--runtime", str(path))


# --- the settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says", "arguments"),
    [
        (71, ("192.0.2.1",), ("--host", "192.0.2.1", "--insecure-no-auth")),  # of another machine
        (78, ("0.0.0.0", "--api-key-file"), ("--host", "0.0.0.0")),  # public, without a key
        *((2, (port,), ("--port", port)) for port in ("-1", "65536", "http")),
        (69, ("no-such-server",), ("--runtime", "no-such-server")),
        (69, ("is not llama-server",), ("--runtime", sys.executable)),
        *((2, ("--ctx-size", size), ("--ctx-size", size)) for size in ("0", "-5")),
        (2, ("--parallel", "0"), ("--parallel", "0")),
        (2, ("--threads", "0"), ("--threads", "0")),
        (2, ("--kv-type", "q3_9"), ("--kv-type", "q3_9")),
        (2, ("--log-level", "loud"), ("--log-level", "loud")),
        (2, ("--log-format", "xml"), ("--log-format", "xml")),
        (2, ("--events", "csv"), ("--events", "csv")),
        (2, ("--no-such-flag",), ("--", "--no-such-flag")),  # unknown to this build
        (2, ("--port", "llamasup"), ("--", "--port", "1234")),  # reserved for llamasup
        (2, ("stray.gguf",), ("stray.gguf",)),  # without a double dash
    ],
)
def test_wrong_options_are_refused(
    code: int, says: tuple[str, ...], arguments: tuple[str, ...], run_tiny: tuple[str, ...]
) -> None:
    refused(code, says, *run_tiny, *arguments)


# --- the environment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "serve"])
def test_variables_of_llama_server_are_named_with_their_options(
    command: str, tiny_model: Path, fake_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1024")
    model = [str(tiny_model)] if command == "run" else ["--models-dir", str(tiny_model.parent)]
    with started(command, *model, "--port", "0", "--runtime", fake_server()) as running:
        running.wait_for("ready")
        assert running.stop() == 0
        assert running.stderr_text.count("LLAMA_ARG_CTX_SIZE (use --ctx-size)") == 1
