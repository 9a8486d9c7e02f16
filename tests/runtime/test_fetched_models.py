"""Models that are somewhere else: what happens until they are here, and once nobody wants them any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from llamasup.core.errors import LlamasupError
from llamasup.core.model_spec import ModelSpec
from llamasup.runtime.downloads import Listener, Progress
from tests.runtime.pools import file_of, in_a_loop, pooled, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.beside]

REF = "org/far:Q4_K_M"


class FarAway:
    """Where models come from: each that is asked for is told and, once it may, brought."""

    def __init__(self, path: Path) -> None:
        self.begun: list[str] = []
        self.called_off: list[str] = []
        self.brought: list[str] = []
        self.may = asyncio.Event()
        self.path = path
        self.progress = Progress(5 << 30, 10 << 30, 1 << 30)

    async def fetch(self, ref: str, listener: Listener) -> Path:
        self.begun.append(ref)
        listener(self.progress)
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.called_off.append(ref)
            raise
        self.brought.append(ref)
        return self.path


@pytest.fixture
def specs(tmp_path: Path, tiny_model: Path) -> dict[str, ModelSpec]:
    return {name: spec_of(file_of(tmp_path, name, tiny_model)) for name in "abc"}


def far(spec: ModelSpec, ref: str = REF) -> ModelSpec:
    return replace(spec, source=ref, identity=())


# --- it cannot be had


@in_a_loop
async def test_a_download_that_fails_as_nobody_thought_of_is_no_end_for_the_others(
    tmp_path: Path, specs: dict[str, ModelSpec], caplog: pytest.LogCaptureFixture
) -> None:
    """S17."""

    async def fetch(ref: str, listener: Listener) -> Path:
        raise PermissionError(13, "Permission denied")

    async with pooled(tmp_path, specs["b"], far(specs["a"]), fetch=fetch) as it:
        await it.load("b")
        before = it.pids("b")
        with pytest.raises(LlamasupError, match="PermissionError") as raised:
            await it.load("a")
        assert raised.value.exit_code == 70
        assert "Permission denied" in caplog.text
        assert (await it.ask("a").refusal()).status == 503
        assert it.pids("b") == before
        assert await it.ask("b").served_by() == 1
