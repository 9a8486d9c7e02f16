"""llama.cpp's archive for Windows is installed as it is, and serves."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.extended.windows.wine import Windows, complete


def test_release_for_windows_is_installed_and_serves(windows: Windows) -> None:
    server = windows.session.llama_server
    if not server.exists():
        pytest.skip(f"{server} is missing: scripts/windows-llama-server says why")
    # Wine needs Microsoft's C++ library, which scripts/windows-llama-server has put beside the program.
    archive = shutil.make_archive(str(windows.folder / "llama-b10605-bin-win-cpu-x64"), "zip", server.parent)
    code, path, said = windows.run("runtime", "install", "--from", windows.folder / archive)
    assert code == 0, said
    assert path.strip().endswith("\\runtimes\\b10605-cpu\\llama-server.exe")
    run = windows.start("run", "demo", "--port", "0", "--events", "jsonl")
    assert complete(run.event("ready")["url"])["content"]
    (listed,) = json.loads(windows.control("runtime", "list", "--json"))["runtimes"]
    assert (listed["name"], listed["used"]) == ("b10605-cpu", True)
    code, _, said = windows.run("runtime", "remove", "b10605")
    assert code == 75, said
    windows.control("stop")
    assert run.wait() == 0
