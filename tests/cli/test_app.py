"""The imports and the help of the command line."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

import llamasup
from llamasup.cli.app import COMMANDS, app
from llamasup.features import FEATURES
from tests.e2e.driver import run_to_end

HEAVY = (
    "asyncio",
    "msgspec",
    "httpx",
    "uvloop",
    "rich",
    "pydantic",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "psutil",
    "yaml",
)


NAMES = [lazy.name for section in COMMANDS.values() for lazy in section]
COMMAND_OF = {lazy.module: lazy.name for section in COMMANDS.values() for lazy in section}
"""One command of each module."""


Imported = dict[tuple[str, ...], set[str]]
ROOT_OPTIONS = ("--version", "--help")
EACH_IN_A_FORK = f"""
import json, os, sys
from llamasup.cli import app, main
for arguments in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0, arguments
        continue
    sys.argv = ["llamasup", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    names = [name for name in sys.modules if name in {(*HEAVY, *COMMAND_OF)!r}]
    print(json.dumps([arguments, names]), file=sys.stderr, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def imported_by() -> Imported:
    """The modules of HEAVY and of commands that each command line imports, in a fork of one process."""
    lines = [[option] for option in ROOT_OPTIONS] + [[name, "--help"] for name in COMMAND_OF.values()]
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stderr.splitlines()]
    return {tuple(arguments): set(names) for arguments, names in reports}


BEFORE_HANDLERS = """
import signal, sys
def handlers():
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
class Imports:
    def find_spec(self, name, path=None, target=None):
        if handlers() == before:
            print(name)
before = handlers()
sys.meta_path.insert(0, Imports())
sys.argv = ["llamasup", "--version"]
from llamasup.cli import main
main()
"""


COSTLY = {"asyncio", "fcntl", "pathlib", "resource", "select", "shutil", "socket", "subprocess", "tempfile"}


def test_handlers_of_signals_are_set_before_other_modules_are_imported() -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE_HANDLERS], capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[:-1])  # the last line is the version
    first = {"llamasup", "llamasup._version", "llamasup.cli", "llamasup.cli.gc_pause"}
    assert {name for name in imported if name.startswith("llamasup")} <= {*first, "llamasup.cli.stop_signals"}
    assert "llamasup.cli.stop_signals" in imported
    assert COSTLY & imported == set()


def test_system_layer_imports_little() -> None:
    """Each start pays for it."""
    program = "import sys; from llamasup.core.system.native import native; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert COSTLY & set(done.stdout.split()) == set()


@pytest.mark.parametrize("option", ROOT_OPTIONS)
def test_root_options_import_neither_commands_nor_heavy_packages(imported_by: Imported, option: str) -> None:
    """This makes a start within 150 ms possible."""
    assert imported_by[option,] == set()


@pytest.mark.parametrize(("module", "name"), COMMAND_OF.items())
def test_help_of_a_command_imports_its_module_only(imported_by: Imported, module: str, name: str) -> None:
    assert imported_by[name, "--help"] - {"msgspec"} == {module}


def test_every_command_is_in_exactly_one_section() -> None:
    assert len(NAMES) == len(set(NAMES))
    declared: list[str] = []
    for module in COMMAND_OF:
        group = get_group(importlib.import_module(module).commands)
        declared += [group.name] if group.name else group.commands
    assert sorted(NAMES) == sorted(declared)
    package = Path(llamasup.__file__).parent
    files = [path for path in package.glob("cli/commands/*.py") if path.name != "__init__.py"]
    files += package.glob("features/*/command.py")
    modules = {".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files}
    subcommands = {feature.config_commands.partition(":")[0] for feature in FEATURES} - {""}
    assert modules == COMMAND_OF.keys() | subcommands


@pytest.mark.parametrize("width", [80, 200])
def test_help_shows_whole_first_help_line_of_each_command(width: int) -> None:
    root = get_group(app)
    context = root.make_context("llamasup", [], resilient_parsing=True, terminal_width=width - 2)
    shown = root.get_help(context)
    for section in COMMANDS.values():
        for lazy in section:
            command = root.get_command(context, lazy.name)
            assert command is not None
            assert command.help is not None
            assert command.help.splitlines()[0] == lazy.summary
            assert re.search(rf"^  {lazy.name} +{re.escape(lazy.summary)}$", shown, re.MULTILINE)


@pytest.mark.parametrize("group", sorted({"service", "key", "config"} & {*NAMES}))
def test_help_of_a_group_shows_whole_summaries(group: str) -> None:
    shown = CliRunner().invoke(app, [group, "--help"], obj=0.0, terminal_width=78).output
    assert "Commands:" in shown
    assert "..." not in shown.partition("Commands:")[2]


def test_mistyped_command_gets_a_suggestion() -> None:
    done = run_to_end("serv")
    assert done.returncode == 2
    assert "Did you mean llamasup serve?" in done.stderr


def test_llamasup_without_command_shows_help() -> None:
    done = run_to_end()
    assert "run" in done.stdout + done.stderr
    assert "plan" in done.stdout + done.stderr


def test_unknown_option_is_a_usage_error() -> None:
    done = run_to_end("run", "demo", "--no-such")
    assert done.returncode == 2
    assert "--no-such" in done.stderr


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("llamasup sto", ["stop"]),
        ("llamasup run --ctx", ["--ctx-size"]),
        ("llamasup config c", ["check"]),
    ],
)
def test_bash_completes_commands_and_options(typed: str, completed: list[str], tmp_path: Path) -> None:
    program = tmp_path / "llamasup"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llamasup "$@"\n')
    program.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$(llamasup completion bash)"
        complete -p llamasup >/dev/null
        COMP_WORDS=({typed}) COMP_CWORD={len(typed.split()) - 1}
        _llamasup_completion llamasup
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_of_each_shell(shell: str) -> None:
    done = run_to_end("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_LLAMASUP_COMPLETE=complete_{shell}" in done.stdout
    assert f"llamasup completion {shell}" in run_to_end("completion", "--help").stdout


def test_completion_of_another_shell_is_refused() -> None:
    done = run_to_end("completion", "tcsh")
    assert done.returncode == 2
    assert "'tcsh' is not bash, zsh or fish" in done.stderr


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        (
            "run",
            [
                "Addresses and access",
                "The model",
                "Requests, and the life of llama-server",
                "Logs and usage",
                "For a program that starts llamasup",
            ],
        ),
        (
            "serve",
            [
                "The models",
                "Defaults for all models",
                "Addresses and access",
                "Logs and usage",
                "For a program that starts llamasup",
            ],
        ),
    ],
)
def test_help_of_a_server_has_sections_and_the_others_last(command: str, sections: list[str]) -> None:
    shown = run_to_end(command, "--help").stdout
    titles = [line.removesuffix(":") for line in shown.splitlines() if re.fullmatch(r"[A-Z][^:]*:", line)]
    assert sorted(titles[:-1]) == sorted({*sections, *(["Arguments"] if command == "run" else [])})
    assert titles[-1] == "Options"
    assert "-h, --help" in shown.rpartition("Options:")[2]
