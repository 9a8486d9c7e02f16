"""A changed link to llama-server: which changes lead to an upgrade."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamasup.errors import BuildRefused, BuildUnproven, Conflict, LlamasupError, RuntimeMissing
from llamasup.pool.upgrade.link import follow_link
from tests.async_tests import async_test
from tests.patience import PATIENCE_S

REFUSED = BuildRefused("The build is refused.")


class Rig:
    """Builds in folders of their own, and a link to one of them. ``errors``: of the next upgrades."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.link = folder / "llama-server"
        self.running = self.build("a")
        self.point_to("a")
        self.errors: list[LlamasupError] = []
        self.asked: list[str] = []
        self._changed = asyncio.Event()

    def build(self, name: str, text: str = "") -> str:
        path = self._folder / name / "llama-server"
        path.parent.mkdir(exist_ok=True)
        written = path.with_name("written")
        written.write_text(text)
        written.rename(path)
        return str(path)

    def point_to(self, name: str) -> None:
        new = self._folder / "new-link"
        new.symlink_to(self._folder / name / "llama-server")
        new.rename(self.link)

    async def upgrade(self, path: str) -> None:
        self.asked.append(Path(path).parent.name)
        self._changed.set()
        if self.errors:
            raise self.errors.pop(0)
        self.running = path

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self._changed.wait()
                self._changed.clear()


@asynccontextmanager
async def following(folder: Path, *, retry_s: float = 3600.0) -> AsyncIterator[Rig]:
    rig = Rig(folder)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            follow_link(str(rig.link), lambda: rig.running, rig.upgrade, poll_s=0.001, retry_s=retry_s)
        )
        await asyncio.sleep(0)  # it has looked at the link
        try:
            yield rig
        finally:
            task.cancel()


@async_test
async def test_build_that_the_link_points_to_is_asked_for_once(tmp_path: Path) -> None:
    async with following(tmp_path) as rig:
        for name in "bc":
            rig.build(name)
            rig.point_to(name)
            await rig.until(lambda: rig.asked[-1:] == [name])  # noqa: B023 - awaited at once
        assert rig.asked == ["b", "c"]
        assert rig.running == str(tmp_path / "c" / "llama-server")


@pytest.mark.parametrize("error", [REFUSED, RuntimeMissing("It is no llama-server.")])
@async_test
async def test_refused_build_is_tried_again_once_it_changes(tmp_path: Path, error: LlamasupError) -> None:
    async with following(tmp_path, retry_s=0) as rig:
        rig.errors = [error]
        rig.build("b")
        rig.point_to("b")
        await rig.until(lambda: rig.asked == ["b"])
        rig.point_to("a")  # it serves
        rig.build("b", "repaired")
        rig.point_to("b")
        await rig.until(lambda: rig.running.endswith("b/llama-server"))
        assert rig.asked == ["b", "b"]


@pytest.mark.parametrize("error", [BuildUnproven("It is not proven."), Conflict("Another one is under way.")])
@async_test
async def test_build_without_a_verdict_is_tried_again(tmp_path: Path, error: LlamasupError) -> None:
    async with following(tmp_path, retry_s=0) as rig:
        rig.errors = [error, error]
        rig.build("b")
        rig.point_to("b")
        await rig.until(lambda: rig.asked == ["b", "b", "b"])


@async_test
async def test_link_to_nothing_changes_nothing(tmp_path: Path) -> None:
    async with following(tmp_path) as rig:
        rig.point_to("missing")
        rig.build("b")
        rig.point_to("b")
        await rig.until(lambda: rig.asked == ["b"])


@async_test
async def test_build_that_is_replaced_in_place_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with following(tmp_path) as rig:
        rig.build("a", "another build")
        async with asyncio.timeout(PATIENCE_S):
            while "was replaced in place" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.001)
        assert rig.asked == []
        rig.build("b")
        rig.point_to("b")
        await rig.until(lambda: rig.asked == ["b"])
    assert caplog.text.count("was replaced in place") == 1
