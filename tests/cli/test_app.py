"""What the command line costs and says before it does anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.driver import run_to_end

HEAVY = (
    "asyncio",
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


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["ps", "--help"], ["run", "--help"]])
def test_asking_imports_nothing_that_only_serving_needs(arguments: list[str]) -> None:
    """What makes 150 ms possible. Time itself is measured by nobody's CI."""
    program = (
        "import sys; sys.argv = ['llamasup', *sys.argv[1:]]\n"
        "from llamasup.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(eval(done.stderr))  # noqa: S307 - our own list
    # typer needs pydantic for options
    assert imported <= ({"pydantic"} if arguments[0] in ("run", "ps") else set())


def test_without_a_command_the_help_is_shown() -> None:
    done = run_to_end()
    assert "run" in done.stdout + done.stderr
    assert "plan" in done.stdout + done.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    done = run_to_end("run", "demo", "--no-such")
    assert done.returncode == 2
    assert "--no-such" in done.stderr
