"""Shows, checks and replaces the config of a running ``serve``."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.config.config_keys import Config
from llamasup.core.config.nodes import MAX_BYTES
from llamasup.core.control.interface import ConfigMistakes, ConfigRefused
from llamasup.core.models.spec import Changes
from llamasup.errors import ConfigInvalid, Conflict, FolderUnusable, LlamasupError
from llamasup.service import config_editing
from llamasup.service.config_editing import ConfigEditor
from llamasup.service.config_source import ConfigSource, Configured
from llamasup.service.serve import ServeOptions
from tests.kit.configs import load
from tests.kit.fake_server import install


class Editing:
    """An editor of ``file``. A reload raises ``error``, and is counted otherwise."""

    def __init__(self, file: Path, folder: Path, tiny_model: Path) -> None:
        self.file = file
        self.head = f"runtime: {install(folder / 'llama-server')}\n"
        (folder / "tiny.gguf").write_bytes(tiny_model.read_bytes())
        self.valid = f"{self.head}models: {{tiny: {{path: {folder}/tiny.gguf}}}}\n"
        file.write_text(self.valid)
        self.reloads = 0
        self.error: LlamasupError | None = None
        self.previewed: list[Config] = []

        def read() -> Config:
            return load(file, os.environ)

        options = ServeOptions.of(read, config_file=file, adjust=lambda config: config)
        source = ConfigSource(options, os.environ)
        self.editor = ConfigEditor(source, preview=self._preview, reload=self._reload)

    def _preview(self, configured: Configured) -> Changes:
        self.previewed.append(configured.config)
        return Changes(added=tuple(configured.inventory.registry.specs))

    async def _reload(self) -> Mapping[str, Any]:
        if self.error is not None:
            raise self.error
        self.reloads += 1
        return {"changed": ["tiny"]}

    def shown(self) -> Mapping[str, Any]:
        return asyncio.run(self.editor.show())

    def checked(self, text: str, *, trusted: bool = True) -> Mapping[str, Any]:
        return asyncio.run(self.editor.check(text, trusted=trusted))

    def replace(self, text: str, version: str | None = None, *, trusted: bool = True) -> Mapping[str, Any]:
        known = self.shown()["version"] if version is None else version
        return asyncio.run(self.editor.replace(text, known, trusted=trusted))


@pytest.fixture
def editing(tmp_path: Path, tiny_model: Path) -> Editing:
    return Editing(tmp_path / "c.yaml", tmp_path, tiny_model)


def test_text_is_shown_with_a_version_that_changes_with_it(editing: Editing) -> None:
    before = editing.shown()
    assert before == {
        "file": str(editing.file),
        "text": editing.valid,
        "version": before["version"],
        "writable": True,
    }
    editing.file.write_text(editing.valid + "# more\n")
    assert editing.shown()["version"] != before["version"]


def test_check_shows_what_would_change_and_writes_nothing(editing: Editing) -> None:
    found = editing.checked(f"{editing.valid}max_loaded: 3\n")
    assert (found["ok"], found["mistakes"]) == (True, [])
    assert found["changes"]["added"] == ["tiny"]
    assert [config.max_loaded for config in editing.previewed] == [3]
    assert editing.file.read_text() == editing.valid


@pytest.mark.parametrize(
    ("more", "line", "key", "part"),
    [
        ("max_loadet: 3\n", 3, "max_loadet", "max_loaded"),
        ("max_loaded: x\n", 3, "max_loaded", ""),
        ("  broken: [\n", None, None, ""),
        ("models: {}\n", None, None, ""),
    ],
)
def test_mistakes_are_shown_with_their_lines(
    editing: Editing, more: str, line: int | None, key: str | None, part: str
) -> None:
    found = editing.checked(editing.valid + more)
    assert (found["ok"], found["changes"]) == (False, None)
    mistake = found["mistakes"][0]
    assert part in mistake["message"]
    if line is not None:
        assert (mistake["line"], mistake["key"]) == (line, key)


def test_model_that_is_missing_is_a_mistake(editing: Editing) -> None:
    found = editing.checked(f"{editing.head}models: {{tiny: {{path: gone.gguf}}}}\n")
    assert [mistake["line"] for mistake in found["mistakes"]] == [2]


@pytest.mark.parametrize(
    "text", ["", "\0", "\ud800", "a: &a [*a]", "x" * (MAX_BYTES + 1), "- 1", "ü: 1"], ids=range(7)
)
def test_text_of_any_kind_is_checked(editing: Editing, text: str) -> None:
    found = editing.checked(text)
    assert found["ok"] is False
    assert found["mistakes"]
    with pytest.raises(ConfigMistakes) as raised:
        editing.replace(text)
    assert raised.value.http_status == 400
    assert raised.value.mistakes == found["mistakes"]
    assert (editing.file.read_text(), editing.reloads) == (editing.valid, 0)


def test_client_may_change_what_names_nothing(editing: Editing) -> None:
    text = f"{editing.valid}max_loaded: 3\n"
    assert editing.checked(text, trusted=False)["ok"] is True
    assert editing.replace(text, trusted=False) == {"changed": ["tiny"]}
    assert editing.file.read_text() == text


@pytest.mark.check("X15")
def test_client_may_not_change_what_names_something(editing: Editing, tmp_path: Path) -> None:
    (tmp_path / "locked").touch(mode=0)
    text = f"{editing.valid}auth: {{api_key_file: {tmp_path}/locked}}\nmax_loaded: '${{NOT_SET}}'\n"
    found = editing.checked(text, trusted=False)
    assert [(one["line"], one["key"]) for one in found["mistakes"]] == [
        (3, "auth.api_key_file"),
        (4, "max_loaded"),
    ]
    assert "not set" not in str(found)
    with pytest.raises(ConfigRefused, match="2 refused changes") as raised:
        editing.replace(text, trusted=False)
    assert (raised.value.http_status, raised.value.cause) == (403, "config_refused")
    assert raised.value.mistakes == found["mistakes"]
    assert (editing.file.read_text(), editing.reloads) == (editing.valid, 0)


def test_file_allows_all_changes_of_clients_except_that_of_the_permission(editing: Editing) -> None:
    editing.file.write_text(f"{editing.valid}http: {{api_config: full}}\n")
    editing.replace(f"{editing.valid}http: {{api_config: full, access_log: /dev/null}}\n", trusted=False)
    written = editing.file.read_text()
    for text in (editing.valid, f"{editing.valid}http: {{api_config: safe}}\n"):
        for trusted in (False, True):
            with pytest.raises(ConfigRefused):
                editing.replace(text, trusted=trusted)
    assert editing.file.read_text() == written


@pytest.mark.parametrize("broken", ["http: {api_config: [", "http: {api_config: ful}\n", ""])
def test_file_that_is_broken_allows_nothing(editing: Editing, broken: str) -> None:
    editing.file.write_text(broken)
    with pytest.raises(ConfigRefused):
        editing.replace(editing.valid, trusted=False)
    assert editing.file.read_text() == broken
    editing.replace(editing.valid, trusted=True)
    assert editing.file.read_text() == editing.valid


def test_valid_text_is_written_and_reloaded(editing: Editing) -> None:
    text = f"{editing.valid}max_loaded: 3\n"
    assert editing.replace(text) == {"changed": ["tiny"]}
    assert (editing.file.read_text(), editing.reloads) == (text, 1)


def test_second_of_two_changes_of_one_text_is_refused(editing: Editing) -> None:
    version = editing.shown()["version"]
    first, second = (f"{editing.valid}max_loaded: {number}\n" for number in (3, 4))
    editing.replace(first, version)
    with pytest.raises(Conflict, match="has changed since") as raised:
        editing.replace(second, version)
    assert raised.value.http_status == 409
    assert (editing.file.read_text(), editing.reloads) == (first, 1)


def test_two_changes_at_the_same_time_write_one(editing: Editing) -> None:
    version = editing.shown()["version"]
    texts = [f"{editing.valid}max_loaded: {number}\n" for number in (3, 4)]

    async def both() -> list[Mapping[str, Any] | BaseException]:
        changes = (editing.editor.replace(text, version, trusted=True) for text in texts)
        return await asyncio.gather(*changes, return_exceptions=True)

    outcomes = asyncio.run(both())
    assert [type(outcome) for outcome in outcomes].count(Conflict) == 1
    assert editing.reloads == 1


def test_file_that_changes_during_the_check_is_not_overwritten(
    editing: Editing, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = editing.editor._checked

    def slow(text: str) -> Any:
        editing.file.write_text("of another editor\n")
        return checked(text)

    version = editing.shown()["version"]
    monkeypatch.setattr(editing.editor, "_checked", slow)
    with pytest.raises(Conflict):
        editing.replace(editing.valid, version)
    assert editing.file.read_text() == "of another editor\n"


def test_text_comes_back_if_the_reload_fails(editing: Editing) -> None:
    editing.error = ConfigInvalid("the models no longer fit")
    with pytest.raises(ConfigInvalid, match="no longer fit"):
        editing.replace(f"{editing.valid}max_loaded: 3\n")
    assert editing.file.read_text() == editing.valid


def test_mode_and_symlink_of_the_file_stay(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "etc").mkdir()
    target, link = tmp_path / "etc" / "real.yaml", tmp_path / "c.yaml"
    target.write_text("")
    target.chmod(0o640)
    link.symlink_to(target)
    editing = Editing(link, tmp_path, tiny_model)
    text = f"{editing.valid}max_loaded: 3\n"
    editing.replace(text)
    assert link.is_symlink()
    assert target.read_text() == text
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_file_that_cannot_be_written_is_refused(editing: Editing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert editing.shown()["writable"] is False
    with pytest.raises(Conflict, match="cannot be changed here"):
        editing.replace(editing.valid)


def test_disk_error_is_reported_and_keeps_the_text(editing: Editing, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(config_editing, "atomic_write", full)
    with pytest.raises(FolderUnusable, match="No space left on device"):
        editing.replace(editing.valid + "\n")
    assert (editing.file.read_text(), editing.reloads) == (editing.valid, 0)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: \0", b"# " + b"x" * MAX_BYTES], ids=range(3))
def test_file_that_is_no_text_of_a_config_is_not_writable(editing: Editing, content: bytes) -> None:
    editing.file.write_bytes(content)
    assert editing.shown()["writable"] is False


def test_missing_file_is_reported(editing: Editing) -> None:
    editing.file.unlink()
    with pytest.raises(ConfigInvalid, match="No such file"):
        editing.shown()


def test_pipe_is_not_read_again(editing: Editing) -> None:
    editing.file.unlink()
    os.mkfifo(editing.file)
    assert (editing.shown()["writable"], editing.shown()["text"]) == (False, "")
