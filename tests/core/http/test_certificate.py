"""The validity dates of a certificate, and the message about them."""

from __future__ import annotations

import base64
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llamasup.core.http.certificate import Validity, validity_of

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)


def made(folder: Path, *words: str) -> str:
    """A certificate of OpenSSL's."""
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "cert"), "-subj", "/CN=x"]
    subprocess.run([*new, *files, *words], check=True, capture_output=True)
    return (folder / "cert").read_text()


def dates(folder: Path) -> list[datetime]:
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(folder / "cert"), "-noout", "-startdate", "-enddate"],
        check=True,
        capture_output=True,
        text=True,
    )
    return [
        datetime.strptime(line.partition("=")[2], "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
        for line in shown.stdout.splitlines()
    ]


@pytest.mark.parametrize("days", ["1", "365", "20000"])  # the last one ends after 2050, in another form
def test_the_dates_are_those_that_openssl_shows(tmp_path: Path, days: str) -> None:
    found = validity_of(made(tmp_path, "-days", days))
    assert found is not None
    assert [found.begins, found.ends] == dates(tmp_path)


def test_the_first_certificate_of_a_chain_counts(tmp_path: Path) -> None:
    first = made(tmp_path, "-days", "3")
    assert validity_of(first + made(tmp_path, "-days", "4")) == validity_of(first)


def pem(der: bytes) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(der).decode()}\n-----END CERTIFICATE-----\n"


def element(tag: int, content: bytes) -> bytes:
    return bytes((tag, len(content))) + content


def of_version_1(begins: bytes, ends: bytes) -> bytes:
    """It has no version, so that the serial number comes first."""
    times = element(0x17, begins) + element(0x17, ends)
    before = element(0x02, b"\x01") + element(0x30, b"") + element(0x30, b"")
    return element(0x30, element(0x30, before + element(0x30, times)))


def test_a_certificate_of_the_last_century_is_read() -> None:
    found = validity_of(pem(of_version_1(b"500101000000Z", b"491231235959Z")))
    assert found == Validity(datetime(1950, 1, 1, tzinfo=UTC), datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        "-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n",
        pem(b""),
        pem(b"\x02\x01\x01"),
        pem(of_version_1(b"yesterday", b"tomorrow")),
    ],
)
def test_anything_else_has_no_dates(text: str) -> None:
    assert validity_of(text) is None


def test_no_cut_certificate_has_dates_that_it_does_not_say() -> None:
    der = of_version_1(b"200101000000Z", b"300101000000Z")
    for size in range(len(der)):
        assert validity_of(pem(der[:size])) is None


@pytest.mark.parametrize(
    ("begins", "ends", "problem", "is_current"),
    [
        (NOW - DAY, NOW + 365 * DAY, "", True),
        (NOW - 351 * DAY, NOW + 14 * DAY, "", True),
        (NOW - 352 * DAY, NOW + 13 * DAY, "expires on 2026-12-05 12:00 UTC", True),
        (NOW - 4 * DAY, NOW + 2 * DAY, "", True),  # one for six days
        (NOW - 5 * DAY, NOW + DAY, "expires on 2026-11-23 12:00 UTC", True),
        (NOW - 365 * DAY, NOW, "expired on 2026-11-22 12:00 UTC", False),
        (NOW + DAY, NOW + 365 * DAY, "is not valid before 2026-11-23 12:00 UTC", False),
    ],
)
def test_message_about_the_dates(begins: datetime, ends: datetime, problem: str, is_current: bool) -> None:
    validity = Validity(begins, ends)
    assert validity.problem(NOW) == problem
    assert validity.is_current(NOW) == is_current
