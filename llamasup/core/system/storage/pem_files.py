"""Explains what is wrong with PEM files: OpenSSL's own message rarely says which file or why."""

from __future__ import annotations

import contextlib
import ssl
import stat
from pathlib import Path


def irregular_file(*files: str) -> str | None:
    """Return the first of ``files`` that exists and is neither a regular file nor a folder.

    OpenSSL would block on a pipe without a writer, and llamasup reads the files several times.
    """
    for file in files:
        with contextlib.suppress(OSError):  # reading the file reports the error
            mode = Path(file).stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return file
    return None


def why_unusable(error: OSError, key_file: str, cert_file: str) -> str:
    """Return the reason for ``error`` of ``load_cert_chain``, with the file."""
    for name in (cert_file, key_file):
        try:
            Path(name).open("rb").close()
        except OSError as unreadable:
            return f"{name!r}: {unreadable.strerror}"
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key belongs to another certificate"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert_file)
    except ssl.SSLError:
        return f"{cert_file!r} contains no PEM certificate"
    return f"{key_file!r} contains no PEM key, or one with a password"
