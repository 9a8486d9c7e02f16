"""The validity dates of an X.509 certificate, and the warning about them.

Python's ``ssl`` shows these dates only for CA certificates and for a verified peer, and no dependency parses
X.509. The dates have a fixed position in the DER encoding (RFC 5280 §4.1). This module reads them from
certificates that OpenSSL has accepted. It verifies nothing.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta

from msgspec import Struct

MAX_PEM_BYTES = 1 << 20  # of a certificate and its chain

# Most authorities recommend renewal 30 days before the end, so at 14 days a renewal has failed.
_SOON = timedelta(days=14)

_PEM = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
_SEQUENCE, _INTEGER, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x02, 0x17, 0x18, 0xA0


class Validity(Struct, frozen=True):
    begins: datetime
    ends: datetime

    def problem(self, now: datetime) -> str:
        """Return the problem with the dates, as the end of a sentence; empty if there is no problem."""
        if now < self.begins:
            return f"is not valid before {_shown(self.begins)}"
        if now >= self.ends:
            return f"expired on {_shown(self.ends)}"
        # For a certificate that is valid for a few days: its last quarter.
        if self.ends - now < min(_SOON, (self.ends - self.begins) / 4):
            return f"expires on {_shown(self.ends)}"
        return ""

    def is_current(self, now: datetime) -> bool:
        """Return whether clients accept the dates now."""
        return self.begins <= now < self.ends


def _shown(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def validity_of(pem: str) -> Validity | None:
    """Return the validity of the first certificate in ``pem``.

    Returns None if ``pem`` has no readable certificate.
    """
    found = _PEM.search(pem)
    if found is None:
        return None
    try:
        return _validity(base64.b64decode(found[1]))
    except (ValueError, IndexError):
        return None


def _validity(der: bytes) -> Validity:
    at, _ = _content(der, 0, _SEQUENCE)  # Certificate
    at, _ = _content(der, at, _SEQUENCE)  # TBSCertificate
    if der[at] == _VERSION:
        _, at = _content(der, at, _VERSION)
    for tag in (_INTEGER, _SEQUENCE, _SEQUENCE):  # serialNumber, signature, issuer
        _, at = _content(der, at, tag)
    at, _ = _content(der, at, _SEQUENCE)  # validity
    begins, at = _time(der, at)
    ends, _ = _time(der, at)
    return Validity(begins, ends)


def _content(der: bytes, at: int, *tags: int) -> tuple[int, int]:
    """Return the start and end of the content of the element at ``at``.

    Raises ValueError for any other tag.
    """
    if der[at] not in tags:
        raise ValueError(f"tag {der[at]:#x} at byte {at}")
    length, begin = der[at + 1], at + 2
    if length >= 0x80:
        size = length & 0x7F
        length, begin = int.from_bytes(der[begin : begin + size]), begin + size
    return begin, begin + length


def _time(der: bytes, at: int) -> tuple[datetime, int]:
    """The time at ``at``, and the position behind it."""
    begin, end = _content(der, at, _UTC_TIME, _GENERALIZED_TIME)
    digits = der[begin:end].decode("ascii")
    if der[at] == _UTC_TIME:  # two digits: 1950 to 2049
        digits = ("19" if digits >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC), end
