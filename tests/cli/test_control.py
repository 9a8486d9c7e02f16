"""The commands for a running llamasup, against a control API without a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.cli import target as chosen
from llamasup.cli.commands import control
from llamasup.cli.target import find_target
from llamasup.control.client import ControlAddress
from llamasup.control.interface import shown
from llamasup.errors import DoesNotFit, LlamasupError, UsageInvalid
from llamasup.models.diff import Changes
from tests.control.fake import FakeControlTarget, served

ANY_LLAMASUP: Mapping[str, Any] = {"pid": None, "url": None, "api_key_file": None, "no_wait": False}


class OneTooLarge(FakeControlTarget):
    """The first of its models cannot be started."""

    async def restart(self, model: str) -> None:
        await super().restart(model)
        if model == "tiny":
            raise DoesNotFit("tiny does not fit", remedy="Buy memory.")


def test_restart_of_all_models_continues_after_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> tuple[FakeControlTarget, int]:
        fake = OneTooLarge()
        async with served(fake, tmp_path) as (_, path):
            monkeypatch.setattr(chosen, "find_target", lambda **_: ControlAddress(socket=path))
            code = await asyncio.to_thread(control.restart, None, **ANY_LLAMASUP, json=True)
        return fake, code

    fake, code = asyncio.run(main())

    assert fake.requests == [("restart", "tiny"), ("restart", "org/repo:q8_0")]
    assert code == DoesNotFit.exit_code != LlamasupError.exit_code
    printed = capfd.readouterr()
    assert [model["id"] for model in json.loads(printed.out)["models"]] == ["org/repo:q8_0"]
    assert "tiny does not fit" in printed.err


class Reloaded(FakeControlTarget):
    async def reload(self) -> Mapping[str, Any]:
        changes = Changes(
            added=("chat", "new"), removed=("tiny", "old"), settings=("memory",), renamed=(("tiny", "chat"),)
        )
        return shown(changes)


def test_reload_shows_renamed_model_neither_as_added_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with served(Reloaded(), tmp_path) as (_, path):
            monkeypatch.setattr(chosen, "find_target", lambda **_: ControlAddress(socket=path))
            assert await asyncio.to_thread(control.reload, None, **ANY_LLAMASUP, json=False) == 0

    asyncio.run(main())

    changes = "added: new; removed: old; renamed: tiny to chat; config: memory"
    assert changes in capfd.readouterr().err


# --- the target ----------------------------------------------------------------------------------------


@pytest.mark.check("X13", "refused, and not shown")
@pytest.mark.parametrize("url", ["http://ann:secret@h:8080", "ann:secret@h", "https://secret@h/x"])
def test_a_url_with_a_password_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageInvalid, match="name or a password") as caught:
        find_target(pid=None, url=url, api_key_file=None)
    assert "secret" not in f"{caught.value} {caught.value.remedy}"


def test_url_without_scheme_gets_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASUP_API_KEY", "k" * 32)
    target = find_target(pid=None, url="h:8080", api_key_file=None)
    assert (target.url, target.socket, target.api_key) == ("http://h:8080", None, "k" * 32)
