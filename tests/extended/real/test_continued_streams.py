"""Streams go on after SIGKILLs of a real llama-server, as if nothing had happened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.extended.real.continued_streams import REQUESTS, kill_in_streams, proof_of_start
from tests.real.remains import folders_of


def test_killed_streams_are_whole_in_every_api(
    runtime: str, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, folder in folders_of(own_folders).items():
        monkeypatch.setenv(variable, folder)
    found = asyncio.run(kill_in_streams(runtime, "demo", kills=3 * len(REQUESTS), seed=20))
    for path, outcomes in found.items():
        print(path, outcomes)
        assert outcomes.wrong == []
    assert sum(outcomes.continued for outcomes in found.values())


@pytest.mark.parametrize(("option", "proof"), [((), True), (("--no-prefill-assistant",), None)])
def test_start_proves_whether_messages_are_continued(
    runtime: str,
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: tuple[str, ...],
    proof: bool | None,
) -> None:
    for variable, folder in folders_of(own_folders).items():
        monkeypatch.setenv(variable, folder)
    found = asyncio.run(proof_of_start(runtime, "demo", option))
    assert found is None if proof is None else found in (True, False)  # which of both differs by build
