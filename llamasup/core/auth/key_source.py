"""Reads API keys from a key file, again whenever it changes, and from the environment; changes a key file.

A command that calls a running llamasup finds its key here, in the server's key file or the environment. One
writer at a time changes a key file, atomically, without losing lines of others.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from llamasup.core.auth.api_key import ApiKey, digest_of, read_key_lines
from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write, private_folder, read_bounded
from llamasup.errors import ConfigInvalid, FolderUnusable

_VARIABLE = "LLAMASUP_API_KEY"
PROCESS_SALT = secrets.token_hex(16).encode()
"""For the digests of plain keys."""

_log = logging.getLogger("llamasup.keys")

_FILE_BYTES = 1 << 20  # 1,000 keys with all attributes take a quarter of it
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_Signature = tuple[int, int, int, int]


def environment_keys(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the key of ``$LLAMASUP_API_KEY``, if it is set.

    Raises ConfigInvalid if no client can send it.
    """
    given = environ.get(_VARIABLE, "")
    if not given:
        return ()
    key = given.strip()
    if not key or _CONTROL.search(key):
        # The key itself is not shown: errors end up in logs.
        what = "with a control character" if key else "that are all blanks"
        raise ConfigInvalid(
            f"${_VARIABLE} has {len(given)} characters {what}.",
            remedy="Set it to text that fits in an HTTP header, or unset it.",
        )
    return (key,)


class KeyFile:
    """A key file and its current keys. Raises ConfigInvalid if the first read fails or finds no key.

    The owner calls ``changed`` from time to time. The previous keys stay valid while the file is missing or
    invalid.

    ``of``: the config key that names the file. Errors show it in place of the path, which may be an API key
    that was pasted there by mistake.

    ``salt``: for the digests of its plain keys.
    """

    def __init__(self, path: Path, *, of: str = "", salt: bytes = PROCESS_SALT) -> None:
        self.path = path
        self._salt = salt
        self.keys: tuple[ApiKey, ...] = ()
        self._signature: _Signature | None = None
        self._settled = False
        self._rejection = ""
        text, status = read_text(path, of=of)
        self.keys = self._parsed(text)
        if not self.keys:
            raise ConfigInvalid(
                f"The API key file {str(path)!r} has no keys.",
                remedy="Add keys, one a line, or leave the file out.",
            )
        # A pipe can be read once only (`--api-key-file <(command)`).
        self._is_file = stat.S_ISREG(status.st_mode)
        self._signature = _signature(status)
        if self._is_file and (warning := _too_open(path, status)):
            _log.warning("%s", warning)

    def changed(self) -> bool:
        """Read the file again if it changed; True if the keys changed. Costs a stat() if the file did not."""
        if not self._is_file:
            return False
        try:
            status = self.path.expanduser().stat()
        except OSError as error:
            self._settled = False  # the same file may come back
            return self._reject(f"{error.strerror or error}.")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe waits for a writer
            return self._reject("it is not a regular file.")
        signature = _signature(status)
        # Two writes within one tick of the file system's clock look like one, so after each change the file
        # is read once more.
        if signature == self._signature and self._settled:
            return False
        self._settled = signature == self._signature
        self._signature = signature
        try:
            text, status = read_text(self.path)
            keys = self._parsed(text)
        except ConfigInvalid as error:
            if isinstance(error.__cause__, OSError):
                self._settled = False  # permissions can change without a change of the file
            return self._reject(error.message)
        self._signature = _signature(status)
        if not text and self.keys and not self._settled:
            return False  # a file that is being overwritten is empty for a moment: read it once more
        if self._rejection:
            self._rejection = ""
            _log.warning("API key file %r is valid again.", str(self.path))
        if keys == self.keys:
            return False
        self.keys = keys
        if keys:
            _log.info("API key file %r changed. Number of keys: %d.", str(self.path), len(keys))
        else:
            _log.warning("API key file %r has no keys now: every key from it is revoked.", str(self.path))
        return True

    def _parsed(self, text: str) -> tuple[ApiKey, ...]:
        lines = read_key_lines(text, str(self.path), salt=self._salt)
        return tuple(line.key for line in lines)

    def _reject(self, reason: str) -> bool:
        if reason != self._rejection:  # logged once, not every second
            self._rejection = reason
            _log.warning(
                "API key file %r changed but was rejected: %s Keeping the previous keys.",
                str(self.path),
                reason,
            )
        return False


def read_text(path: Path, *, follow: bool = True, of: str = "") -> tuple[str, os.stat_result]:
    """Read the text and stat of a key file.

    ``follow`` symlinks; ``of`` as in KeyFile. Raises ConfigInvalid.
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
        raise _unreadable(path, of, "the user after ~ does not exist") from error


def _unreadable(path: Path, of: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"The API key file {f'of {of}' if of else repr(str(path))} cannot be read: {reason}.",
        remedy="Give the path of a file with one key a line.",
    )


def _signature(status: os.stat_result) -> _Signature:
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def _too_open(path: Path, status: os.stat_result) -> str:
    if not native.is_open_to_others(status):
        return ""
    # systemd grants a credential to its service by an ACL, which shows as the group's right.
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    if credentials and path.is_relative_to(credentials):
        return ""
    return (
        f"Other users can read the API key file {str(path)!r} "
        f"(mode {stat.S_IMODE(status.st_mode):04o}). Run `chmod 600 {path}`."
    )


def client_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """Choose the first key of the file with the control right, else its only key.

    Without a file, it is the environment's key.

    Raises ConfigInvalid if the file has no such key in plain text.
    """
    if path is None:
        return next(iter(environment_keys(environ)), None)
    text, _ = read_text(path)
    plain = [line for line in read_key_lines(text, str(path), salt=PROCESS_SALT) if not line.hashed]
    chosen = next((line for line in plain if line.key.controls), plain[0] if len(plain) == 1 else None)
    if chosen is None:
        raise ConfigInvalid(
            f"The API key file {str(path)!r} has no plain key with the control right.",
            remedy="Write the key alone into another file, or create one: `llamasup key new NAME --rights "
            "control`.",
        )
    line = text.removeprefix("\ufeff").split("\n")[chosen.number - 1].strip("\r \t")
    word = line.split(None, 1)[0]
    # Without attributes the whole line is the key, with its blanks.
    return word if digest_of(PROCESS_SALT, word.encode()) == chosen.key.digest else line


# A command holds the lock for milliseconds.
_LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_INTERVAL_S = 0.02


def default_key_file() -> Path:
    """Return ``~/.config/llamasup/keys``, or the equivalent of the platform."""
    import platformdirs

    return platformdirs.user_config_path("llamasup", appauthor=False) / "keys"


def key_file_text(path: Path) -> str | None:
    """Read the text of the file. None: it is missing. Raises ConfigInvalid."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # reading it reports the reason
    else:
        if not stat.S_ISREG(status.st_mode):
            what = "is a symlink" if stat.S_ISLNK(status.st_mode) else "is not a regular file"
            raise ConfigInvalid(
                f"The API key file {str(path)!r} {what}.", remedy="Give the path of the file itself."
            )
    return read_text(path, follow=False)[0]


def change_key_file(path: Path, change: Callable[[str | None], str]) -> None:
    """Replace the text of the file (None: it is missing) with the result of ``change``.

    A new file has mode 0600; an existing one keeps its mode and its owner. If ``change`` raises, the file is
    unchanged. Raises ConfigInvalid and FolderUnusable.
    """
    with _locked(_folder_of(path)):
        text = change(key_file_text(path))
        try:
            before = path.stat() if path.exists() else None
            mode = 0o600 if before is None else stat.S_IMODE(before.st_mode)
            atomic_write(path, text.encode(), durable=True, mode=mode)
            if before is not None:
                native.give_back(path, before)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error


def _folder_of(path: Path) -> Path:
    folder = path.parent
    if path == default_key_file():
        try:
            return private_folder(folder)
        except FolderUnusable as error:
            raise FolderUnusable(error.message, remedy=f"{error.remedy} Or give another --file.") from None
    if not folder.is_dir():
        raise _unwritable(path, "the folder does not exist")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commands out by a lock on the folder; it needs no lock file and ends with the process."""
    try:
        fd = native.open_folder(folder.resolve())  # the folder may be a symlink, the file may not
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error)) from error
    if fd is None:  # Windows: two commands at the same moment are rare, and each replaces the whole file
        yield
        return
    try:
        deadline = monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                native.lock(fd)
                break
            except BlockingIOError:
                if monotonic() > deadline:
                    raise _unwritable(
                        folder, f"another program has held its lock for {_LOCK_TIMEOUT_S:g} s"
                    ) from None
                sleep(_LOCK_POLL_INTERVAL_S)
        yield
    finally:
        os.close(fd)


def _unwritable(path: Path, reason: str) -> FolderUnusable:
    return FolderUnusable(
        f"{str(path)!r} cannot be written: {reason}.",
        remedy="Give the path of a file in a folder that you may write to.",
    )
