"""`llamasup ui`, against the console of a control API without a process."""

from __future__ import annotations

import asyncio
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.auth.key_limits import Keys
from llamasup.cli import target as chosen
from llamasup.cli.commands.ui import ui
from llamasup.console.routes import Console
from llamasup.control.client import ControlAddress, ControlClient
from llamasup.errors import Conflict, OutputFailed
from llamasup.proxy.console_access import ConsoleAccess
from tests.control.fake import FakeControlTarget, served

TARGET: Mapping[str, Any] = {"pid": None, "url": None, "api_key_file": None}
PAGE = "http://127.0.0.1:8080/llamasup/"


def run_ui(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    print_: bool,
    is_on: bool = True,
    opens: bool = True,
) -> tuple[int, list[str]]:
    """The exit code, and the addresses that a browser opened."""
    opened: list[str] = []

    def open_(url: str) -> bool:
        opened.append(url)
        return opens

    monkeypatch.setattr(webbrowser, "open", open_)

    def make(wake: Callable[[], None]) -> Console:
        return Console(ConsoleAccess(is_on=is_on), Keys(None, (), lambda: 0.0), wake, PAGE)

    async def main() -> int:
        async with served(FakeControlTarget(), folder, make) as (_, path):
            monkeypatch.setattr(chosen, "find_target", lambda **_: ControlAddress(socket=path))
            return await asyncio.to_thread(ui, None, **TARGET, print_=print_)

    return asyncio.run(main()), opened


def test_browser_opens_the_console_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, (address,) = run_ui(tmp_path, monkeypatch, print_=False)
    assert code == 0
    assert address.startswith(f"{PAGE}#token=")
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "#token=" not in printed.err  # a terminal may be recorded


def test_print_shows_the_address_and_opens_no_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, opened = run_ui(tmp_path, monkeypatch, print_=True)
    assert (code, opened) == (0, [])
    assert capfd.readouterr().out.startswith(f"{PAGE}#token=")


def test_missing_browser_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run_ui(tmp_path, monkeypatch, print_=False, opens=False)
    assert code == OutputFailed.exit_code
    assert "llamasup ui --print" in capfd.readouterr().err


def test_llamasup_without_a_console_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, opened = run_ui(tmp_path, monkeypatch, print_=False, is_on=False)
    assert (code, opened) == (Conflict.exit_code, [])
    assert "--no-ui" in capfd.readouterr().err


def test_console_of_another_machine_has_the_given_address(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other machine does not know under which name it is reached from here."""
    answered = {"token": "t", "url": "https://127.0.0.1:8443/llamasup/#token=t", "expires_s": 60}
    monkeypatch.setattr(ControlClient, "console_token", lambda _: answered)
    monkeypatch.setattr(
        chosen, "find_target", lambda **_: ControlAddress(url="https://llm.example/", api_key="k")
    )
    assert ui(None, **TARGET, print_=True) == 0
    assert capfd.readouterr().out == "https://llm.example/llamasup/#token=t\n"
