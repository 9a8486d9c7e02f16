"""llamasup parses the help of the embedded runtime like that of llama-server."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from llamasup.core.llama_server.help_text import looks_like_llama_server, parse_help, parse_version
from llamasup.core.system.hardware.devices import parse_devices
from llamasup.embedded.program import help_text, supported, version_text
from tests.kit.paths import FIXTURES
from tests.real.embedded.child import COMMAND

REAL = FIXTURES / "help" / "b11434.txt"

# The real text lists this build's templates or is about things that the embedded runtime has not.
OTHER_WORDS = {"--chat-template", "--chat-template-file"}


def ask(question: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, question], capture_output=True, text=True, timeout=60, check=False)


def test_every_option_reads_as_llama_servers_own(params: Any) -> None:
    real = {option.spellings: option for option in parse_help(REAL.read_text())}
    ours = parse_help(help_text(supported(params)))
    assert len(ours) > 150
    for option in ours:
        twin = real[option.spellings]
        if option.spellings[-1] in OTHER_WORDS:
            assert (option.argument, option.env) == (twin.argument, twin.env)
        else:
            assert option == twin


def test_the_layout_is_llama_servers_line_by_line(params: Any) -> None:
    real = set(REAL.read_text().splitlines())
    strange = [line for line in help_text(supported(params)).splitlines() if line not in real]
    assert len(strange) == 2, strange  # the shortened lists of templates


@pytest.mark.usefixtures("xllamacpp")
def test_capabilities_show_unix_sockets() -> None:
    answer = ask("--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    options = parse_help(answer.stdout)
    assert looks_like_llama_server(options)
    host = next(option for option in options if "--host" in option.spellings)
    assert ".sock" in host.description


def test_the_version_is_that_of_the_wheel_and_goes_to_stderr(xllamacpp: Any) -> None:
    answer = ask("--version")
    assert (answer.returncode, answer.stdout) == (0, "")
    release, _, build = xllamacpp.__version__.rpartition(".")
    assert parse_version(answer.stderr) == f"xllamacpp {release} (b{build})"
    assert answer.stderr.splitlines()[1].startswith("built with ")


@pytest.mark.parametrize(
    ("version", "build", "commit", "text"),
    [
        ("2026.10.11549", 0, "unknown", "xllamacpp 2026.10 (b11549)"),
        (
            "2026.10.11549",
            11550,
            "3ce7da2",
            "xllamacpp 2026.10.11549 (llama.cpp build 11550, commit 3ce7da2)",
        ),
        ("0.2.1", 0, "unknown", "xllamacpp 0.2.1 (llama.cpp build 0, commit unknown)"),
        ("next", 0, "unknown", "xllamacpp next (llama.cpp build 0, commit unknown)"),
    ],
)
def test_the_build_is_the_last_part_of_the_version_if_the_wheel_does_not_know_it(
    version: str, build: int, commit: str, text: str
) -> None:
    assert version_text(version, build, commit) == text


@pytest.mark.usefixtures("xllamacpp")
def test_devices_are_listed_as_llama_server_lists_them_without_the_cpu() -> None:
    answer = ask("--list-devices")
    assert answer.returncode == 0
    first, *others = answer.stdout.splitlines()
    assert first == "Available devices:"
    assert others == ["  (none)"] or len(parse_devices(answer.stdout)) == len(others)


def test_a_device_is_described_by_name_and_memory(xllamacpp: Any) -> None:
    from types import SimpleNamespace

    from llamasup.embedded.program import device_list

    kinds = xllamacpp.ggml_backend_dev_type
    mib = 1024 * 1024
    found = [
        {"name": "CPU", "description": "a CPU", "memory_total": 1, "memory_free": 1,
         "type": kinds.GGML_BACKEND_DEVICE_TYPE_CPU},
        {"name": "CUDA0", "description": "NVIDIA X (1)", "memory_total": 24 * mib, "memory_free": 5 * mib,
         "type": kinds.GGML_BACKEND_DEVICE_TYPE_GPU},
    ]  # fmt: skip
    wheel = SimpleNamespace(ggml_backend_dev_type=kinds, get_device_info=lambda: found)
    text = device_list(wheel)
    assert text == "Available devices:\n  CUDA0: NVIDIA X (1) (24 MiB, 5 MiB free)\n"
    assert [device.name for device in parse_devices(text)] == ["CUDA0"]


@pytest.mark.usefixtures("xllamacpp")
def test_help_into_a_closed_pipe_prints_no_traceback() -> None:
    child = subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    with child.stderr as errors:
        assert errors.read() == ""
    child.wait(60)
