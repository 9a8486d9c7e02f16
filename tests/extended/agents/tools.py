"""Three tools for libraries that bring none of their own."""

import subprocess
from pathlib import Path


def read_file(path: str) -> str:
    """Return the text of a file."""
    return Path(path).read_text()


def write_file(path: str, content: str) -> str:
    """Write a text into a file."""
    return f"{Path(path).write_text(content)} characters"


def run_command(command: str) -> str:
    """Run a command of the shell."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    return done.stdout or "done"
