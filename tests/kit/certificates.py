"""Certificates that OpenSSL makes for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["make_certificate"]

_NEW = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_certificate(folder: Path, name: str, hosts: str = "DNS:localhost,IP:127.0.0.1") -> tuple[str, str]:
    """A certificate of ``hosts`` that is its own CA, and its key."""
    files = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={hosts}")
    subprocess.run([*_NEW, *names, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files
