"""Reads API keys: from a file with one key a line, again whenever the file changes, and from the environment.

Also finds the key that a command shows to a running llamasup: in the server's own key file, or in the
environment.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from llamasup.auth.key_file import read_key_lines
from llamasup.auth.keys import ApiKey, digest_of
from llamasup.errors import ConfigInvalid
from llamasup.system.storage.folders import read_bounded

__all__ = ["PROCESS_SALT", "KeyFile", "client_key", "environment_keys", "read_text"]


VARIABLE = "LLAMASUP_API_KEY"
PROCESS_SALT = secrets.token_hex(16).encode()
"""For the digests of keys that are plain where they come from."""

_log = logging.getLogger("llamasup.keys")

_FILE_BYTES = 1 << 20  # a thousand keys with all that can be said of them are a quarter of it
_UNHEARD = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_Signature = tuple[int, int, int, int]


def environment_keys(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The key of ``$LLAMASUP_API_KEY``, if it is set. Raises ConfigInvalid for what no client can send."""
    given = environ.get(VARIABLE, "")
    if not given:
        return ()
    key = given.strip()
    if not key or _UNHEARD.search(key):
        # The key itself is not shown: errors end up in logs.
        what = "holds a control character" if key else "holds nothing but blanks"
        raise ConfigInvalid(
            f"${VARIABLE} has {len(given)} characters and {what}.",
            remedy="Set it to text that an HTTP header can carry, or to nothing.",
        )
    return (key,)


class KeyFile:
    """A file of keys and what it said last. Raises ConfigInvalid when it is read for the first time.

    ``changed`` is called from time to time. Keys that were read once stay until the file says others, or that
    there is none any more: one that is gone or wrong says nothing. It has keys when it is read first.

    ``of``: the key of the config that names it, where one does. It is told then in the place of a path that
    cannot be read: that may be an API key, pasted where its file belongs.
    """

    def __init__(self, path: Path, *, of: str = "") -> None:
        self.path = path
        self.keys: tuple[ApiKey, ...] = ()
        self._signature: _Signature | None = None
        self._settled = False
        self._complaint = ""
        text, status = read_text(path, of=of)
        self.keys = self._understood(text)
        if not self.keys:
            raise ConfigInvalid(
                f"The API key file {str(path)!r} holds no key.",
                remedy="Write one key a line into it, or leave it out.",
            )
        # What a pipe held is gone (`--api-key-file <(command)`).
        self._is_file = stat.S_ISREG(status.st_mode)
        self._signature = _signature(status)
        if self._is_file and (warning := _too_open(path, status)):
            _log.warning("%s", warning)

    def changed(self) -> bool:
        """Look whether the file says something else, and read it then. Costs a stat() if it does not."""
        if not self._is_file:
            return False
        try:
            status = self.path.expanduser().stat()
        except OSError as error:
            self._settled = False  # it may come back as it was
            return self._complain(f"{error.strerror or error}.")
        if not stat.S_ISREG(status.st_mode):  # to open a pipe is to wait for who writes into it
            return self._complain("it is no file any more.")
        signature = _signature(status)
        # Two writes within one tick of the file system's clock look like one: after each change the file is
        # read once more, by when the tick is over.
        if signature == self._signature and self._settled:
            return False
        self._settled = signature == self._signature
        self._signature = signature
        try:
            text, status = read_text(self.path)
            keys = self._understood(text)
        except ConfigInvalid as error:
            if isinstance(error.__cause__, OSError):
                self._settled = False  # who may read it can change without a change of the file
            return self._complain(error.message)
        self._signature = _signature(status)
        if not text and self.keys and not self._settled:
            return False  # a file that is written over is empty for a moment: it is looked at once more
        if self._complaint:
            self._complaint = ""
            _log.warning("The API key file %r is as it should be again.", str(self.path))
        if keys == self.keys:
            return False
        self.keys = keys
        if keys:
            _log.info("The API key file %r has changed: %d keys.", str(self.path), len(keys))
        else:
            _log.warning("The API key file %r holds no key any more: nobody gets in by it.", str(self.path))
        return True

    def _understood(self, text: str) -> tuple[ApiKey, ...]:
        lines = read_key_lines(text, str(self.path), salt=PROCESS_SALT)
        return tuple(line.key for line in lines)

    def _complain(self, what: str) -> bool:
        if what != self._complaint:  # said once, not every second
            self._complaint = what
            _log.warning(
                "The API key file %r has changed, and is not taken over: %s The keys before still count.",
                str(self.path),
                what,
            )
        return False


def read_text(path: Path, *, follow: bool = True, of: str = "") -> tuple[str, os.stat_result]:
    """What a file of keys says, and what it was. ``follow``: through a symlink; ``of`` as in KeyFile. Raises
    ConfigInvalid.
    """
    flags = 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    try:
        content, status = read_bounded(path.expanduser(), _FILE_BYTES + 1, flags=flags)
        if len(content) > _FILE_BYTES:
            raise _unreadable(path, of, f"it is larger than {_FILE_BYTES} bytes")
        return content.decode("utf-8"), status
    except OSError as error:
        raise _unreadable(path, of, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _unreadable(path, of, "it is not UTF-8 text") from error
    except RuntimeError as error:  # ~name
        raise _unreadable(path, of, "there is no such user") from error


def _unreadable(path: Path, of: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"The API key file {f'of {of}' if of else repr(str(path))} cannot be read: {reason}.",
        remedy="Give a file with one key a line.",
    )


def _signature(status: os.stat_result) -> _Signature:
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def _too_open(path: Path, status: os.stat_result) -> str:
    if sys.platform == "win32" or not stat.S_IMODE(status.st_mode) & 0o077:
        return ""
    # systemd grants a credential to its service by an ACL, which shows as the group's right.
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    if credentials and path.is_relative_to(credentials):
        return ""
    return (
        f"The API key file {str(path)!r} can be read by others than its owner "
        f"(mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}"
    )


def client_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """The first key of the file that may control, or else its only one. None: there is no key at all.

    Raises ConfigInvalid for a file that has none that can be sent.
    """
    if path is None:
        return next(iter(environment_keys(environ)), None)
    text, _ = read_text(path)
    plain = [line for line in read_key_lines(text, str(path), salt=PROCESS_SALT) if not line.hashed]
    chosen = next((line for line in plain if line.key.controls), plain[0] if len(plain) == 1 else None)
    if chosen is None:
        raise ConfigInvalid(
            f"The API key file {str(path)!r} holds no key that may control and is not hashed.",
            remedy="Make one: llamasup key new NAME --rights control; or keep just the key in a file.",
        )
    line = text.removeprefix("\ufeff").split("\n")[chosen.number - 1].strip("\r \t")
    word = line.split(None, 1)[0]
    # A line without attributes is a key as a whole, blanks and all.
    return word if digest_of(PROCESS_SALT, word.encode()) == chosen.key.digest else line
