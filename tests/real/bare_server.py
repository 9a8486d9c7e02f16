"""A real server without llamasup, on a Unix socket."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.patience import PATIENCE_S

__all__ = ["bare_server"]


@contextmanager
def bare_server(runtime: str, path: Path, *options: str) -> Iterator[None]:
    """``runtime``: the path of a llama-server, or ``embedded``. It listens on ``path`` and is ready."""
    command = [sys.executable, "-m", "llamasup.embedded"] if runtime == "embedded" else [runtime]
    environment = {
        "HOME": str(path.parent),
        "XDG_CONFIG_HOME": str(path.parent),
        "PATH": os.environ["PATH"],
        **({} if runtime == "embedded" else {"LD_LIBRARY_PATH": str(Path(runtime).parent)}),
    }
    process = subprocess.Popen(
        [*command, "--host", str(path), *options],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    lines = process.stderr
    ready = threading.Event()

    def drain() -> None:
        for line in lines:
            if b"listening on" in line:
                ready.set()

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        assert ready.wait(PATIENCE_S), "the server did not become ready"
        yield
    finally:
        process.kill()
        process.wait()
        reader.join()
        lines.close()
