"""A link to llama-server that changes: the upgrade that it leads to, and its errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamasup.errors import BuildRefused, BuildUnproven, Conflict, LlamasupError
from llamasup.features.upgrade import follow as module
from llamasup.features.upgrade import followed_path
from llamasup.features.upgrade.follow import follow
from tests.kit.async_tests import async_test
from tests.kit.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    for name in ("FIRST_RETRY_S", "CONFLICT_RETRY_S", "MISSING_S"):
        monkeypatch.setattr(followed_path, name, 0.0)


class Rig:
    """Builds in folders of their own, and a link to one of them. ``errors``: of the next upgrades."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.link = folder / "llama-server"
        self.running = str(self.build("a"))
        self.point_to("a")
        self.errors: list[LlamasupError] = []
        self.asked: list[str] = []
        self._asked = asyncio.Event()

    def build(self, name: str, text: str = "") -> Path:
        path = self._folder / name / "llama-server"
        path.parent.mkdir(exist_ok=True)
        written = path.with_name("written")
        written.write_text(text)
        return written.replace(path)

    def point_to(self, name: str) -> None:
        new = self._folder / "new-link"
        new.symlink_to(self._folder / name / "llama-server")
        new.replace(self.link)

    async def upgrade(self, path: str) -> None:
        self.asked.append(Path(path).parent.name)
        self._asked.set()
        if self.errors:
            raise self.errors.pop(0)
        self.running = path

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self._asked.wait()
                self._asked.clear()


@asynccontextmanager
async def following(folder: Path) -> AsyncIterator[Rig]:
    rig = Rig(folder)
    looked = asyncio.Event()

    def running() -> str:
        looked.set()
        return rig.running

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follow(str(rig.link), running, rig.upgrade))
        await looked.wait()
        try:
            yield rig
        finally:
            task.cancel()


async def until_logged(log: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in log.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "errors",
    [[], [BuildUnproven("Not proven.")] * 2, [Conflict("Another one is under way.")]],
    ids=["at-once", "unproven", "conflict"],
)
@async_test
async def test_models_get_the_build_of_a_changed_link(tmp_path: Path, errors: list[LlamasupError]) -> None:
    async with following(tmp_path) as rig:
        rig.errors = list(errors)
        rig.build("b")
        rig.point_to("b")
        await rig.until(lambda: rig.running == str(tmp_path / "b" / "llama-server"))
        assert rig.asked == ["b"] * (len(errors) + 1)


@async_test
async def test_refused_build_is_tried_again_once_a_library_of_it_changes(tmp_path: Path) -> None:
    async with following(tmp_path) as rig:
        rig.errors = [BuildRefused("The build is refused.")]
        rig.build("b")
        rig.point_to("b")
        await rig.until(lambda: rig.asked == ["b"])
        (tmp_path / "b" / "libllama.so").write_bytes(b"repaired")
        await rig.until(lambda: rig.asked == ["b", "b"])


@async_test
async def test_file_that_is_replaced_in_place_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with following(tmp_path) as rig:
        rig.build("b")
        rig.point_to("b")
        await rig.until(lambda: rig.asked == ["b"])
        rig.build("b", "another build")
        await until_logged(caplog, "was replaced in place")
        assert rig.asked == ["b"]


@async_test
async def test_link_to_nothing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with following(tmp_path) as rig:
        rig.point_to("missing")
        await until_logged(caplog, "points to nothing")
        assert rig.asked == []
