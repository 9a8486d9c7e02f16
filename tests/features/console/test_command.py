"""`llamasup ui`, against the console of a control API without a process."""

from __future__ import annotations

import asyncio
import os
import stat
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.cli import target as chosen
from llamasup.core.auth.keys import Keys
from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.proxy.console_access import ConsoleAccess
from llamasup.core.system.process import run_folder
from llamasup.errors import Conflict, OutputFailed
from llamasup.features.console.command import ui
from llamasup.features.console.routes import Console
from llamasup.features.console.sign_in_file import write_sign_in_file
from tests.core.control.fake import FakeControlTarget, served

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
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))

    def make(wake: Callable[[], None]) -> Console:
        return Console(ConsoleAccess(is_on=is_on), Keys(None, (), lambda: 0.0), wake, PAGE)

    async def main() -> int:
        async with served(FakeControlTarget(), folder, make) as (_, path):
            monkeypatch.setattr(chosen, "find_target", lambda **_: ControlAddress(socket=path))
            return await asyncio.to_thread(ui, None, **TARGET, print_=print_)

    return asyncio.run(main()), opened


@pytest.mark.check("X4")
def test_browser_opens_a_private_file_and_no_argument_has_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, (argument,) = run_ui(tmp_path, monkeypatch, print_=False)
    assert code == 0
    file = Path(argument.removeprefix("file://"))
    token = file.read_text().partition(f'location.replace("{PAGE}#token=')[2].partition('"')[0]
    assert len(token) >= 43
    assert token not in argument
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    printed = capfd.readouterr()
    assert printed.out == ""
    assert token not in printed.err  # a terminal may be recorded


def test_file_of_an_old_token_is_removed_by_the_next_one(tmp_path: Path) -> None:
    made = []
    for age_s in (120, 30, 0):
        made.append(write_sign_in_file(tmp_path, PAGE))
        os.utime(made[-1], (made[-1].stat().st_mtime - age_s,) * 2)
    assert [file.exists() for file in made] == [False, True, True]


def test_address_cannot_end_the_script_of_its_file(tmp_path: Path) -> None:
    page = write_sign_in_file(tmp_path, "http://x/</script><script>alert(1)//").read_text()
    assert page.count("</script>") == 1


def test_folder_that_cannot_be_used_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(run_folder, "_run_bases", lambda: iter([tmp_path / "file"]))
    code, opened = run_ui_elsewhere(monkeypatch, print_=False)
    assert (code, opened) == (OutputFailed.exit_code, [])
    assert "llamasup ui --print" in capfd.readouterr().err


def test_file_is_in_the_run_folder_which_the_stop_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, (opened,) = run_ui(tmp_path, monkeypatch, print_=False)
    file = Path(opened.removeprefix("file://"))
    assert (code, file.parent) == (0, tmp_path)  # of the socket
    assert not (tmp_path / "run").exists()


def test_file_for_another_machine_is_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code, (opened,) = run_ui_elsewhere(monkeypatch, print_=False)
    assert (code, Path(opened.removeprefix("file://")).parent) == (0, tmp_path / "llamasup")


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


def run_ui_elsewhere(monkeypatch: pytest.MonkeyPatch, *, print_: bool) -> tuple[int, list[str]]:
    """With the console of another machine, which does not know under which name it is reached from here."""
    answered = {"token": "t", "url": "https://127.0.0.1:8443/llamasup/#token=t", "expires_s": 60}
    opened: list[str] = []

    def open_(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", open_)
    monkeypatch.setattr(ControlClient, "console_token", lambda _: answered)
    monkeypatch.setattr(
        chosen, "find_target", lambda **_: ControlAddress(url="https://llm.example/", api_key="k")
    )
    return ui(None, **TARGET, print_=print_), opened


def test_console_of_another_machine_has_the_given_address(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ui_elsewhere(monkeypatch, print_=True) == (0, [])
    assert capfd.readouterr().out == "https://llm.example/llamasup/#token=t\n"
