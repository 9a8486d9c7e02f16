"""Derives what the members of a fleet need from its one secret (pure).

A node accepts requests with ``node_key``, and the control API with ``control_key``, which no other machine
uses. A front shows the directory ``directory_key``. The directory signs its answers, because the way to it
may be plain http: an attacker there can neither invent nodes nor learn the key for them.
"""

from __future__ import annotations

import hashlib
import hmac


def derived(secret: str, purpose: str) -> bytes:
    return hmac.digest(secret.encode(), f"llamasup fleet: {purpose}".encode(), hashlib.sha256)


def fleet_id(secret: str) -> str:
    """Return a name of the fleet that is no key for anything."""
    return derived(secret, "name").hex()[:16]


def node_key(secret: str) -> str:
    return f"llamasup-fleet-{derived(secret, 'requests').hex()}"


def control_key(secret: str) -> str:
    return f"llamasup-fleet-{derived(secret, 'control').hex()}"


def directory_key(secret: str) -> str:
    return f"llamasup-fleet-{derived(secret, 'directory').hex()}"


def signature(secret: str, nonce: str, body: bytes) -> str:
    """Sign ``body``. ``nonce`` is that of the request: no earlier answer can be sent again."""
    signed = hashlib.sha256(nonce.encode()).digest() + hashlib.sha256(body).digest()
    return hmac.digest(derived(secret, "signature"), signed, hashlib.sha256).hex()


def is_signed(secret: str, nonce: str, body: bytes, given: str) -> bool:
    return hmac.compare_digest(signature(secret, nonce, body).encode(), given.encode())
