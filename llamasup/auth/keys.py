"""API keys (X4): whose a key is, what it may do and how much of it, and which key a credential is.

A key is never kept, only a digest of it. A fast hash is enough: generated keys have 256 random bits, and no
hash makes a short password safe. The salt keeps equal keys in two files from looking equal; for keys that are
plain in their file it is this process's own, so that what is in memory tells nothing to anybody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Literal

__all__ = ["ApiKey", "KeyLimits", "KeyRing", "Priority", "digest_of", "plain_keys"]

Priority = Literal["normal", "high"]

# A client sends one, or two where a library adds its own to the one that it was given. The bound is for
# those who would have a hundred headers compared with every key.
_MAX_CREDENTIALS = 4


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may ask of the model; None: as much as there is. Per minute, and at one time."""

    requests_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_minute: int | None = None

    def __bool__(self) -> bool:
        return (
            self.requests_per_minute is not None
            or self.concurrent is not None
            or self.tokens_per_minute is not None
        )


_NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``name``: what logs, limits and fairness know it by. ``priority``: the highest that it may ask for.
    ``models``: names, with ``*`` and ``?``, of those that it may use; empty: all.
    """

    name: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    infers: bool = True
    controls: bool = False
    limits: KeyLimits = _NO_LIMITS
    priority: Priority = "normal"
    models: tuple[str, ...] = ()


def digest_of(salt: bytes, key: bytes) -> bytes:
    """As ``printf %s "$salt$key" | sha256sum``."""
    return hashlib.sha256(salt + key).digest()


def plain_keys(keys: Iterable[str], salt: bytes) -> tuple[ApiKey, ...]:
    """Inference keys that come without a file: ``given-1``, ``given-2``, …"""
    once = dict.fromkeys(keys)
    return tuple(
        # A variable of the environment may hold bytes that are no UTF-8 (PEP 383).
        ApiKey(f"given-{number}", salt, digest_of(salt, key.encode("utf-8", "surrogateescape")))
        for number, key in enumerate(once, 1)
    )


class KeyRing:
    """Finds the key that a credential is. Takes as long for a wrong one as for any of the right ones.

    Costs a hash for each salt (a file that llamasup has written has one) and a comparison for each key.
    """

    __slots__ = ("_by_salt", "controls")

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Of two entries for the same key the first counts."""
        by_salt: dict[bytes, list[tuple[bytes, ApiKey]]] = {}
        self.controls = False  # whether any of them opens the control API
        for key in keys:
            by_salt.setdefault(key.salt, []).append((key.digest, key))
            self.controls |= key.controls
        self._by_salt = tuple((salt, tuple(reversed(entries))) for salt, entries in reversed(by_salt.items()))

    def find(self, credentials: tuple[bytes, ...]) -> ApiKey | None:
        """The key of the first credential that is one."""
        found = None
        for credential in reversed(credentials[:_MAX_CREDENTIALS]):
            if not credential:  # a file may hold the hash of a variable that was not set
                continue
            for salt, entries in self._by_salt:
                digest = digest_of(salt, credential)
                for known, key in entries:
                    if compare_digest(digest, known):
                        found = key
        return found
