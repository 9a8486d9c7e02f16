"""Allowlist entries for Host (X2), Origin (X3) and hosts of media URLs (X7), in the spelling of clients."""

from __future__ import annotations

import re

from llamasup.core.errors import UsageInvalid
from llamasup.core.http import parse_authority

__all__ = ["ANYWHERE", "allowed_host", "allowed_media_host", "allowed_origin"]

ANYWHERE = "any"
"""As a media host: every host."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_USUAL_PORTS = {"http": 80, "https": 443}


def allowed_host(text: str) -> str:
    """The name or address of a Host header, without its port: any port is taken. Raises UsageInvalid."""
    if "*" in text:
        raise UsageInvalid(
            f"{text!r} would let any web page in that brings its own name for this address (DNS rebinding).",
            remedy="Name each host.",
        )
    bare = text if text.startswith("[") or text.count(":") < 2 else f"[{text}]"
    parsed = parse_authority(bare.encode("utf-8", "replace"))
    if parsed is None or not parsed[0]:
        raise UsageInvalid(f"{text!r} is no host name.", remedy="Give a name such as llm.example.net.")
    name, port = parsed
    if port is not None:
        raise UsageInvalid(f"{text!r} has a port.", remedy=f"Give {name}: every port of it is taken.")
    return name


def allowed_origin(text: str) -> str:
    """An Origin as browsers send it: scheme, name, and the port where it is not the usual one.

    Raises UsageInvalid.
    """
    if "*" in text:
        raise UsageInvalid(
            f"{text!r} would let every web page that somebody here has open use the model.",
            remedy="Name each origin.",
        )
    scheme, separator, authority = text.lower().partition("://")
    parsed = parse_authority(authority.encode("utf-8", "replace"))
    if not separator or not _SCHEME.fullmatch(scheme) or parsed is None or not parsed[0]:
        raise UsageInvalid(
            f"{text!r} is no origin.",
            remedy="Give scheme, name and port alone, such as https://chat.example.net or http://localhost:3000.",
        )
    name, port = parsed
    host = f"[{name}]" if ":" in name else name
    return f"{scheme}://{host}" + ("" if port in (None, _USUAL_PORTS.get(scheme)) else f":{port}")


def allowed_media_host(text: str) -> str:
    """A host that llama-server may fetch media from: ``HOST``, ``HOST:PORT`` or ``any``.

    Raises UsageInvalid.
    """
    parsed = parse_authority(text.encode("utf-8", "replace"))
    if parsed is None or not parsed[0]:
        raise UsageInvalid(
            f"{text!r} is not a valid media host.",
            remedy="Give HOST or HOST:PORT, such as cdn.example.net or 10.0.0.5:8000, or any for every host.",
        )
    name, port = parsed
    host = f"[{name}]" if ":" in name else name
    return host if port is None else f"{host}:{port}"
