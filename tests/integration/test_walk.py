"""``scripts/walk.py`` traces a request and a crash in a llamasup with a fake llama-server."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.paths import ROOT


def test_walks_name_the_rooms_of_a_request_and_of_a_crash() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "walk.py"), "--list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if "|" in line]
    walks = {room: (request, crash) for _, room, request, crash, _ in rows[2:]}
    assert all(walks["core/proxy"])
    request, crash = walks["core/planning"]
    assert (request, bool(crash)) == ("", True)
    assert "\n  core/supervision/state_machine: " in printed
