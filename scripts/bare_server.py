"""Measures the start of llama-server without llamasup, for the scripts that compare the two."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["seconds_to_ready"]

READY_LINE = b"listening on"


def seconds_to_ready(plan: Mapping[str, Any]) -> float:
    """From exec to the server's ready line, for the command line of ``plan`` (``llamasup plan --json``)."""
    with tempfile.TemporaryDirectory() as folder:
        argv = list(plan["argv"])
        host = argv.index("--host") + 1
        if argv[host].endswith(".sock"):
            argv[host] = f"{folder}/s.sock"
        environment = {name: value for name, value in plan["env"].items() if value != "***"}
        environment["XDG_CONFIG_HOME"] = folder
        began = time.monotonic()
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        ) as process:
            assert process.stdout is not None
            assert any(READY_LINE in line for line in process.stdout), argv
            took_s = time.monotonic() - began
            process.kill()
        return took_s
