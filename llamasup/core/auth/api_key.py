"""API keys: their names, rights and limits, and which key a credential matches.

Only digests of keys are stored. A fast hash is enough: generated keys have 256 random bits, and no hash makes
a short password safe. The salt hides that two files have the same key. Plain keys are hashed with a salt of
this process, so digests in its memory are useless elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from hmac import compare_digest
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import force_setattr

Priority = Literal["normal", "high"]

# A client sends one credential, or two if a library adds its own. The bound limits the cost of a request with
# a hundred headers.
_MAX_CREDENTIALS = 4


class KeyLimits(Struct, frozen=True):
    """The limits of one key, per minute and at the same time; None: no limit."""

    requests_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_minute: int | None = None

    def __bool__(self) -> bool:
        return (
            self.requests_per_minute is not None
            or self.concurrent is not None
            or self.tokens_per_minute is not None
        )


NO_LIMITS: Final = KeyLimits()
"""Most keys have these limits; recognized without a call."""


class ApiKey(Struct, frozen=True):
    """One API key.

    ``name`` identifies the key in logs and limits. ``priority`` is the highest that it may request.
    ``models`` are names and patterns of the models that it may use; empty: all. ``is_node``: another llamasup
    has it, which may mark its requests with ``X-Llamasup-Node``.
    """

    name: str
    salt: bytes
    digest: bytes
    infers: bool = True
    controls: bool = False
    limits: KeyLimits = NO_LIMITS
    priority: Priority = "normal"
    models: tuple[str, ...] = ()
    is_node: bool = False
    client: str = ""
    """The name of its client in records and queues: ``key:NAME``. Computed, because each request needs it."""

    def __post_init__(self) -> None:
        force_setattr(self, "client", f"key:{self.name}")

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"  # without the digest

    @property
    def rights(self) -> tuple[str, ...]:
        has = (("inference", self.infers), ("control", self.controls), ("node", self.is_node))
        return tuple(right for right, is_given in has if is_given)


def digest_of(salt: bytes, key: bytes) -> bytes:
    """Hash a key like ``printf %s "$salt$key" | sha256sum``."""
    return hashlib.sha256(salt + key).digest()


def plain_keys(keys: Iterable[str], salt: bytes) -> tuple[ApiKey, ...]:
    """Make the inference keys from options or the environment: ``given-1``, ``given-2`` and so on."""
    return tuple(
        # An environment variable may have bytes that are not UTF-8 (PEP 383).
        ApiKey(f"given-{number}", salt, digest_of(salt, key.encode("utf-8", "surrogateescape")))
        for number, key in enumerate(dict.fromkeys(keys), 1)
    )


class KeyRing:
    """Finds the key of a credential, in the same time for valid and invalid ones.

    Costs a hash for each salt (a file that llamasup wrote has one) and a comparison for each key.
    """

    __slots__ = ("_by_salt", "controls")

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Use the first of two entries for the same key."""
        by_salt: dict[bytes, list[tuple[bytes, ApiKey]]] = {}
        self.controls = False  # whether any key has the control right
        for key in keys:
            by_salt.setdefault(key.salt, []).append((key.digest, key))
            self.controls |= key.controls
        self._by_salt = tuple((salt, tuple(reversed(entries))) for salt, entries in reversed(by_salt.items()))

    def find(self, credentials: tuple[bytes, ...]) -> ApiKey | None:
        """Find the key of the first valid credential."""
        found = None
        for credential in reversed(credentials[:_MAX_CREDENTIALS]):
            if not credential:  # a file may have the hash of an unset variable
                continue
            for salt, entries in self._by_salt:
                digest = digest_of(salt, credential)
                for known, key in entries:
                    if compare_digest(digest, known):
                        found = key
        return found
