"""The option ``--ollama [ADDRESS]``."""

from __future__ import annotations

import pytest
import typer

from llamasup.cli.command_group import with_ollama
from llamasup.core.proxy.listeners.listen import ListenerSet
from llamasup.errors import UnsafeBind, UsageInvalid
from llamasup.service.options import ListenOptions, check_address, ollama_listener
from tests.e2e.driver import run_to_end
from tests.kit.ports import free_port


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m.gguf"], ["m.gguf"]),
        (["m.gguf", "--ollama"], ["m.gguf", "--ollama=127.0.0.1:11434"]),
        (["--ollama", "m.gguf"], ["--ollama=127.0.0.1:11434", "m.gguf"]),
        (["--ollama", "org/repo:Q4_K_M"], ["--ollama=127.0.0.1:11434", "org/repo:Q4_K_M"]),
        (["--ollama", "--port", "0"], ["--ollama=127.0.0.1:11434", "--port", "0"]),
        (["--ollama", "gemma:2"], ["--ollama=127.0.0.1:11434", "gemma:2"]),
        (["--ollama=localhost:80", "m"], ["--ollama=localhost:80", "m"]),
        (["--alias", "--ollama", "m"], ["--alias", "--ollama", "m"]),
        (["m", "--alias"], ["m", "--alias"]),
        (["m", "--", "--ollama"], ["m", "--", "--ollama"]),
    ],
)
def test_option_without_a_value_has_the_address_of_ollama(arguments: list[str], expected: list[str]) -> None:
    assert with_ollama(arguments, {"--alias", "--port"}) == expected


@pytest.mark.parametrize(
    "address", ["11500", "localhost", "localhost:80", "127.0.0.1", "127.0.0.1:80", "[::1]:80", "/run/o.sock"]
)
def test_address_must_be_part_of_the_option(address: str) -> None:
    with pytest.raises(typer.BadParameter, match="write --ollama=") as caught:
        with_ollama(["m", "--ollama", address], set())
    assert f"write --ollama={address};" in str(caught.value)


def test_command_line_with_a_separate_address_says_what_to_write() -> None:
    ended = run_to_end("run", "--ollama", "11500", "m.gguf")
    assert ended.returncode == 2
    assert "--ollama=11500" in ended.stderr


def test_other_commands_do_not_have_the_option() -> None:
    ended = run_to_end("ps", "--ollama")
    assert ended.returncode == 2
    assert "No such option" in ended.stderr


@pytest.mark.parametrize("address", ["11434", "127.0.0.1", ":80", "h:99999", ""])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(UsageInvalid, match="--ollama"):
        check_address(ListenOptions(ollama=address))


def test_address_that_other_machines_reach_needs_a_key() -> None:
    with pytest.raises(UnsafeBind, match=r"--ollama 0\.0\.0\.0"):
        check_address(ListenOptions(ollama="0.0.0.0:11434"))
    check_address(ListenOptions(ollama="0.0.0.0:11434", api_keys=("sk-1",)))
    check_address(ListenOptions(ollama="127.0.0.1:11434"))


def test_listener_is_opened_only_if_it_is_asked_for() -> None:
    assert ollama_listener(ListenOptions(), None) is None
    port = free_port()
    opening = ollama_listener(ListenOptions(ollama=f"127.0.0.1:{port}"), None)
    assert opening is not None
    listeners = opening()
    assert isinstance(listeners, ListenerSet)
    assert listeners.sockets[0].getsockname() == ("127.0.0.1", port)
    listeners.close()
