"""What ``llamasup run`` imports before it starts the server: each package delays the start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# What only serving, another command or a failure needs. httpcore is imported while the model is being loaded.
LATER = {
    "httpcore",
    "httpx",
    "tenacity",
    "psutil",
    "pydantic",
    "prompt_toolkit",
    "rich",
    "yaml",
    "uvicorn",
    "starlette",
    "prometheus_client",
    "sqlite3",
    "llamasup.features.usage.saver",
    "llamasup.features.usage.report",
}
PROGRAM = """
import os, sys
from llamasup.core.supervision import generation
spawn = generation.spawn
def spied(*args, **options):
    print(*sys.modules, flush=True)
    os.kill(os.getpid(), 15)
    return spawn(*args, **options)
generation.spawn = spied
from llamasup.cli import main
sys.argv = ["llamasup", *sys.argv[1:]]
main()
"""


def test_server_is_started_before_what_only_serving_needs_is_imported(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    arguments = ["run", str(tiny_model), "--port", "0", "--runtime", fake_server()]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "llamasup.core.proxy.proxy" in imported, done.stderr
    assert LATER & imported == set()
