"""Reads where spans are sent, from the variables of the OpenTelemetry specification (pure).

``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` turns tracing on. An invalid
variable turns it off with an error. It stops no start, because such variables are often set for a
whole machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from llamasup.errors import ConfigInvalid

__all__ = ["ENDPOINTS", "Sampler", "TracingSettings", "is_sampled", "read_settings"]

_ANY, _TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"
ENDPOINTS: Final = (f"{_TRACES}ENDPOINT", f"{_ANY}ENDPOINT")
SERVICE_NAME: Final = "llamasup"
_TIMEOUT_S: Final = 10.0  # of the specification
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # of a header (RFC 9110 §5.1)
_VALUE = re.compile(r"[ -~]*")
_TRACE_ID_BITS: Final = 64  # that decide; the upper half may have a fixed part


class Sampler(Struct, frozen=True):
    """The sampler. ``share`` is that of the traces that llamasup begins. ``follows_parent``: a client decides
    for its own.
    """

    share: float = 1.0
    follows_parent: bool = True


class TracingSettings(Struct, frozen=True):
    """The settings of the exporter. ``url`` is that of ``POST``. ``resource``: the attributes of this
    service. Headers may be secrets.
    """

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = _TIMEOUT_S
    certificate: str | None = None
    gzip: bool = False
    sampler: Sampler = Sampler()
    resource: tuple[tuple[str, str], ...] = (("service.name", SERVICE_NAME),)

    def __repr__(self) -> str:
        return f"<TracingSettings {self.shown_url}>"

    @property
    def shown_url(self) -> str:
        """The URL without its query, which may contain a key."""
        return urlsplit(self.url)._replace(query="", fragment="").geturl()


def read_settings(environ: Mapping[str, str]) -> TracingSettings | None:
    """Read the settings; None if tracing is off. Raises ConfigInvalid."""
    if not any(environ.get(name) for name in ENDPOINTS):
        return None
    exporters = set(map(str.strip, environ.get("OTEL_TRACES_EXPORTER", "").split(",")))
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not {"", "otlp"} & exporters:
        return None
    _check_protocol(environ)
    return TracingSettings(
        _url(environ),
        _headers(environ),
        _timeout_s(environ),
        _of(environ, "CERTIFICATE")[1] or None,
        _is_compressed(environ),
        _sampler(environ),
        _resource(environ),
    )


def _of(environ: Mapping[str, str], what: str) -> tuple[str, str]:
    """The name of the variable for traces, or else for all signals, and its value; empty: neither is set."""
    name = f"{_TRACES}{what}" if environ.get(f"{_TRACES}{what}") else f"{_ANY}{what}"
    return name, environ.get(name, "").strip()


def _url(environ: Mapping[str, str]) -> str:
    name, value = _of(environ, "ENDPOINT")
    parts = _split(value)
    if parts is None:
        raise ConfigInvalid(
            f"${name} is not the URL of a collector.", remedy="Use a URL such as http://127.0.0.1:4318."
        )
    if "@" in parts.netloc:  # it would be in messages
        raise ConfigInvalid(f"${name} contains a password.", remedy=f"Use ${_ANY}HEADERS for it.")
    if name == ENDPOINTS[1]:
        parts = parts._replace(path=f"{parts.path.rstrip('/')}/v1/traces")
    return parts._replace(path=parts.path or "/", fragment="").geturl()


def _split(url: str) -> SplitResult | None:
    if not url.isascii() or not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if is_valid else None


def _check_protocol(environ: Mapping[str, str]) -> None:
    name, value = _of(environ, "PROTOCOL")
    if value not in ("", "http/protobuf"):
        raise ConfigInvalid(
            f"${name} is {value[:40]!r}, but llamasup sends spans only as http/protobuf.",
            remedy=f"Set {_TRACES}PROTOCOL=http/protobuf, and {ENDPOINTS[0]} to the HTTP port of the "
            "collector (usually http://HOST:4318/v1/traces).",
        )


def _headers(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    name, value = _of(environ, "HEADERS")
    headers = _pairs(value)
    if headers is None or not all(_NAME.fullmatch(key) and _VALUE.fullmatch(text) for key, text in headers):
        raise ConfigInvalid(  # without the value, which may be a key
            f"${name} is invalid.", remedy="Write NAME=VALUE,NAME=VALUE, with %2C for a comma in a value."
        )
    return headers


def _resource(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    name = "OTEL_RESOURCE_ATTRIBUTES"
    pairs = _pairs(environ.get(name, ""))
    if pairs is None:
        raise ConfigInvalid(
            f"${name} is invalid.", remedy="Write NAME=VALUE,NAME=VALUE, with %2C for a comma in a value."
        )
    resource = {"service.name": SERVICE_NAME, **dict(pairs)}
    if service := environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = service
    return tuple(resource.items())


def _pairs(text: str) -> tuple[tuple[str, str], ...] | None:
    """Read ``name=value,…`` with percent escapes, as W3C Baggage; None if it is invalid."""
    pairs = []
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if equals and key.strip():
            pairs.append((unquote(key.strip()), unquote(value.strip())))
        elif pair.strip():
            return None
    return tuple(pairs)


def _timeout_s(environ: Mapping[str, str]) -> float:
    name, value = _of(environ, "TIMEOUT")
    if not value:
        return _TIMEOUT_S
    if not re.fullmatch(r"[0-9]{1,7}", value) or not int(value):
        raise ConfigInvalid(f"${name} is {value[:40]!r}.", remedy="Give whole milliseconds, such as 10000.")
    return int(value) / 1000.0


def _is_compressed(environ: Mapping[str, str]) -> bool:
    name, value = _of(environ, "COMPRESSION")
    if value not in ("", "none", "gzip"):
        raise ConfigInvalid(f"${name} is {value[:40]!r}.", remedy="Use gzip or none.")
    return value == "gzip"


def _sampler(environ: Mapping[str, str]) -> Sampler:
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip() or "parentbased_always_on"
    kind = name.removeprefix("parentbased_")
    follows_parent = kind != name
    match kind:
        case "always_on":
            return Sampler(1.0, follows_parent)
        case "always_off":
            return Sampler(0.0, follows_parent)
        case "traceidratio":
            return Sampler(_share(environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()), follows_parent)
    raise ConfigInvalid(
        f"$OTEL_TRACES_SAMPLER is {name[:40]!r}.",
        remedy="Use always_on, always_off, traceidratio, or one of these after parentbased_.",
    )


def _share(text: str) -> float:
    try:
        share = float(text or 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ConfigInvalid(f"$OTEL_TRACES_SAMPLER_ARG is {text[:40]!r}.", remedy="Use a number from 0 to 1.")
    return share


def is_sampled(sampler: Sampler, trace_id: str, parent_sampled: bool, dice: int) -> bool:
    """Whether to export the spans of a request. ``trace_id``: of its client; empty: it has none.

    ``dice``: 64 random bits, for the traces that llamasup begins.
    """
    if trace_id and sampler.follows_parent:
        return parent_sampled
    bits = int(trace_id, 16) % (1 << _TRACE_ID_BITS) if trace_id else dice
    return bits < int(sampler.share * (1 << _TRACE_ID_BITS))
