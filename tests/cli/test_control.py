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
from llamasup.cli.output.error_report import guarded
from llamasup.cli.target import find_target, with_each_client
from llamasup.core.control import discovery
from llamasup.core.control.client import ControlAddress
from llamasup.core.control.interface import shown
from llamasup.core.control.selection import Discovered, Running, Unresponsive
from llamasup.core.models.spec import Changes
from llamasup.errors import DoesNotFit, LlamasupError, ModelUnknown, NotRunning, UsageInvalid
from tests.core.control.fake import FakeControlTarget, served

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


# --- why


EVIL = "<b>x</b>\x1b[31m"


class Explained(FakeControlTarget):
    """One of its models has a name that could change a terminal or a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names[EVIL] = ()

    def why(self, model: str) -> Mapping[str, Any]:
        answer = super().why(model)
        return {**answer, "change": [f"Unload {model}."] if model == EVIL else []}


def why(folder: Path, monkeypatch: pytest.MonkeyPatch, model: str | None, *, json: bool = False) -> int:
    async def main() -> int:
        async with served(Explained(), folder) as (_, path):
            monkeypatch.setattr(chosen, "find_target", lambda **_: ControlAddress(socket=path))
            options = {name: value for name, value in ANY_LLAMASUP.items() if name != "no_wait"}
            return await asyncio.to_thread(control.why, None, model=model, **options, json=json)

    return asyncio.run(main())


def test_why_prints_sentences_and_escapes_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why(tmp_path, monkeypatch, EVIL) == 0
    assert capfd.readouterr().out == (
        "<b>x</b>\\x1b[31m is loaded.\nWhat would have to change:\n  → Unload <b>x</b>\\x1b[31m.\n"
    )


def test_why_without_a_change_prints_only_the_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why(tmp_path, monkeypatch, "tiny") == 0
    assert capfd.readouterr().out == "tiny is loaded.\n"


def test_why_prints_the_whole_answer_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why(tmp_path, monkeypatch, EVIL, json=True) == 0
    printed = capfd.readouterr().out
    assert "\x1b" not in printed
    assert json.loads(printed)["sentences"] == [f"{EVIL} is loaded."]


def test_why_of_an_unknown_model_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why(tmp_path, monkeypatch, "tinny") == ModelUnknown.exit_code == 66
    assert "The nearest is 'tiny'." in capfd.readouterr().err


def test_why_without_a_name_needs_a_single_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why(tmp_path, monkeypatch, None) == UsageInvalid.exit_code
    assert "3 models are served; MODEL is required." in capfd.readouterr().err


# --- the target ----------------------------------------------------------------------------------------


@pytest.mark.check("X13")
@pytest.mark.parametrize("url", ["http://ann:secret@h:8080", "ann:secret@h", "https://secret@h/x"])
def test_a_url_with_a_password_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageInvalid, match="name or a password") as caught:
        find_target(pid=None, url=url, api_key_file=None)
    assert "secret" not in f"{caught.value} {caught.value.remedy}"


def test_url_without_scheme_gets_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASUP_API_KEY", "k" * 32)
    target = find_target(pid=None, url="h:8080", api_key_file=None)
    assert (target.url, target.socket, target.api_key) == ("http://h:8080", None, "k" * 32)


def test_each_of_several_is_asked_although_others_fail(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    running = [
        Running(pid, f"http://127.0.0.1:{pid}", "1", (), str(tmp_path / f"{pid}.sock")) for pid in (41, 42)
    ]
    found = Discovered(tuple(running), (Unresponsive(43, "hangs"),))
    monkeypatch.setattr(discovery, "discover", lambda: found)

    def act(_: object, which: str) -> None:
        raise NotRunning(f"{which} has ended.")

    code = guarded(lambda view: with_each_client(view, {"pid": None, "url": None}, act))()
    said = capfd.readouterr().err
    assert code == 69
    assert all(f"http://127.0.0.1:{pid} has ended." in said for pid in (41, 42))
    assert "The llamasup with PID 43 does not answer." in said
