"""The commands that talk to a running llamasup, against one without any process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.cli.commands import control
from llamasup.control.client import ControlAddress
from llamasup.control.interface import shown
from llamasup.errors import DoesNotFit, LlamasupError
from llamasup.models.diff import Changes
from tests.control.fake import FakeControlTarget, served

ANY_LLAMASUP: Mapping[str, Any] = {"pid": None, "url": None, "api_key_file": None, "no_wait": False}


class OneTooLarge(FakeControlTarget):
    """The first of its models cannot be started."""

    async def restart(self, model: str) -> None:
        await super().restart(model)
        if model == "tiny":
            raise DoesNotFit("tiny does not fit", remedy="Buy memory.")


def test_of_several_that_are_restarted_one_that_fails_keeps_none_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> tuple[FakeControlTarget, int]:
        fake = OneTooLarge()
        async with served(fake, tmp_path) as (_, path):
            monkeypatch.setattr(control, "reach", lambda **_: ControlAddress(socket=path))
            code = await asyncio.to_thread(control.restart, None, **ANY_LLAMASUP, json=True)
        return fake, code

    fake, code = asyncio.run(main())

    assert fake.requests == [("restart", "tiny"), ("restart", "org/repo:q8_0")]
    assert code == DoesNotFit.exit_code != LlamasupError.exit_code
    printed = capfd.readouterr()
    assert [each["id"] for each in json.loads(printed.out)["models"]] == ["org/repo:q8_0"]
    assert "tiny does not fit" in printed.err


class Reloaded(FakeControlTarget):
    async def reload(self) -> Mapping[str, Any]:
        changes = Changes(
            added=("chat", "new"), removed=("tiny", "old"), settings=("memory",), renamed=(("tiny", "chat"),)
        )
        return shown(changes)


def test_a_reload_tells_what_has_another_name_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with served(Reloaded(), tmp_path) as (_, path):
            monkeypatch.setattr(control, "reach", lambda **_: ControlAddress(socket=path))
            assert await asyncio.to_thread(control.reload, None, **ANY_LLAMASUP, json=False) == 0

    asyncio.run(main())

    said = "added: new; removed: old; renamed: tiny to chat; config: memory"
    assert said in capfd.readouterr().err
