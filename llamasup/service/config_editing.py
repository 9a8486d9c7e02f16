"""Shows, checks and replaces the config file of a running ``serve`` (docs/control.md)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from llamasup.core.config.api_changes import Outside, refused_changes
from llamasup.core.config.issues import ConfigIssues, Issue
from llamasup.core.config.nodes import MAX_BYTES
from llamasup.core.config.reading import Reading, read_text
from llamasup.core.control.interface import ConfigMistakes, ConfigRefused, shown
from llamasup.core.models.spec import Changes
from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write, read_bounded
from llamasup.core.system.text import path_text
from llamasup.errors import ConfigInvalid, Conflict, FolderUnusable, LlamasupError
from llamasup.features import config_keys
from llamasup.service.config_check import environment_issues, model_issues
from llamasup.service.config_source import ConfigSource, Configured


class _File(Struct, frozen=True):
    """``version`` changes with every byte of the content."""

    content: bytes
    version: str
    writable: bool


class ConfigEditor:
    """Changes the file of ``source``, which alone makes the config.

    ``preview`` returns what a reload with this config would change, and ``reload`` carries it out.
    """

    def __init__(
        self,
        source: ConfigSource,
        *,
        preview: Callable[[Configured], Changes],
        reload: Callable[[], Awaitable[Mapping[str, Any]]],
    ) -> None:
        options = source.options
        assert options.config_file is not None
        assert options.adjust is not None
        self._file = options.config_file
        self._source = source
        self._environ = source.environ
        self._adjust = options.adjust
        self._more_models = options.more_models
        self._preview = preview
        self._reload = reload
        self._lock = asyncio.Lock()  # one change after the other

    async def show(self) -> Mapping[str, Any]:
        read = await asyncio.to_thread(self._read)
        return {
            "file": path_text(str(self._file)),
            "text": read.content.decode("utf-8", "replace"),
            "version": read.version,
            "writable": read.writable,
        }

    async def check(self, text: str, *, trusted: bool) -> Mapping[str, Any]:
        before = await asyncio.to_thread(self._read)
        issues = await asyncio.to_thread(self._refused, before, text, trusted=trusted)
        configured = None
        if not issues:
            issues, configured = await asyncio.to_thread(self._checked, text)
        changes = None if configured is None else shown(self._preview(configured))
        return {"ok": not issues, "mistakes": as_mistakes(issues), "changes": changes}

    async def replace(self, text: str, version: str, *, trusted: bool) -> Mapping[str, Any]:
        """Raises ConfigMistakes, ConfigRefused, and Conflict if the file has another version.

        If the reload fails, the file gets its text back: the next start would fail as well.
        """
        async with self._lock:
            before = await asyncio.to_thread(self._read)
            self._refuse_other_version(before, version)
            if refused := await asyncio.to_thread(self._refused, before, text, trusted=trusted):
                raise ConfigRefused(str(self._file), as_mistakes(refused))
            issues, _ = await asyncio.to_thread(self._checked, text)
            if issues:
                raise ConfigMistakes(str(self._file), as_mistakes(issues))
            content = text.encode()
            await asyncio.to_thread(self._write, content, version)
            try:
                return await self._reload()
            except LlamasupError:
                with suppress(LlamasupError):  # changed again, or not writable any more
                    await asyncio.to_thread(self._write, before.content, _version(content))
                raise

    # --- in a thread

    def _read(self) -> _File:
        try:
            if not stat.S_ISREG(self._file.stat().st_mode):  # a pipe can be read only once
                return _File(b"", "", writable=False)
            content, _ = read_bounded(self._file, MAX_BYTES + 1)
        except OSError as error:
            raise ConfigInvalid(
                f"The config {str(self._file)!r} cannot be read: {error.strerror or error}.",
                remedy="Restore the file, or stop llamasup and start it with another one.",
            ) from None
        is_whole = len(content) <= MAX_BYTES and b"\0" not in content
        with suppress(UnicodeDecodeError):
            content.decode()
            target = self._file.resolve()
            writable = is_whole and os.access(target.parent, os.W_OK) and os.access(target, os.W_OK)
            return _File(content, _version(content), writable)
        return _File(content, _version(content), writable=False)

    def _reading(self, content: bytes) -> tuple[Reading, tuple[Issue, ...]]:
        """Raises ConfigIssues if the content is not YAML."""
        folder = self._file.absolute().parent
        return read_text(
            content, str(self._file), folder, self._environ, config_keys(), more_models=self._more_models
        )

    def _refused(self, before: _File, text: str, *, trusted: bool) -> Sequence[Issue]:
        """The changes that a client may not make. They are found before the text is checked, because the
        checks open its files, and tell what is in the environment.
        """
        known, full = Outside(), trusted
        with suppress(ConfigIssues):  # a broken file allows nothing
            reading, _ = self._reading(before.content)
            known, full = reading.outside, trusted or reading.config.http.api_config == "full"
        try:
            reading, _ = self._reading(text.encode("utf-8", "surrogatepass"))
        except ConfigIssues:
            return ()  # ``_checked`` reports what is wrong
        return refused_changes(known, reading.outside, reading.config.lines, full=full)

    def _checked(self, text: str) -> tuple[Sequence[Issue], Configured | None]:
        """The mistakes of ``text``, and what would be served if it has none."""
        try:
            reading, issues = self._reading(text.encode("utf-8", "surrogatepass"))
            is_readable = not issues
            issues += environment_issues(reading, self._environ)
            if is_readable:
                issues += model_issues(reading, self._environ, issues, self._source)[0]
            if not issues:
                return (), self._source.configured(self._adjust(reading.config))
        except ConfigInvalid as error:
            found = error.issues if isinstance(error, ConfigIssues) else (Issue(0, "", error.message),)
            return found, None
        return tuple(sorted(set(issues))), None

    def _write(self, content: bytes, version: str) -> None:
        """Replace the content, and keep the mode and the owner. A symlink stays, and its target changes."""
        target = self._file.resolve()
        self._refuse_other_version(self._read(), version)  # changed during the check
        try:
            before = target.stat()
            atomic_write(target, content, durable=True, mode=stat.S_IMODE(before.st_mode))
            native.give_back(target, before)
        except OSError as error:
            raise FolderUnusable(
                f"The config {str(target)!r} cannot be written: {error.strerror or error}.",
                remedy="Let llamasup's user write to the file and its folder, or change the file there.",
            ) from None

    def _refuse_other_version(self, read: _File, version: str) -> None:
        if not read.writable:
            raise Conflict(
                f"The config {str(self._file)!r} cannot be changed here.",
                remedy="It must be a text file that llamasup's user may write, in a folder of this user.",
            )
        if read.version != version:
            raise Conflict(
                "The config has changed since this text was read.",
                remedy="Read it again, and repeat the change there.",
            )


def as_mistakes(issues: Sequence[Issue]) -> Sequence[Mapping[str, Any]]:
    """Return the issues as ``config check --json`` shows them."""
    return [{"line": issue.line or None, "key": issue.key, "message": issue.what} for issue in issues]


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
