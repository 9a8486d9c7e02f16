"""Makes the certificates of a fleet. Every member derives the same authority from the fleet's secret.

The authority's key is derived, and an Ed25519 signature depends only on key and content: so the certificate
is the same on every machine, and need not be distributed before the fleet starts.
"""

from __future__ import annotations

import datetime
import ipaddress

from msgspec import Struct

from llamasup.core.system.extras import install_command
from llamasup.errors import FleetUnusable
from llamasup.fleet.secret import derived

_NAME = "llamasup fleet"
_FROM = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2099, 1, 1, tzinfo=datetime.UTC)  # a new secret makes a new authority


class NodeCertificate(Struct, frozen=True):
    """The certificate of a node and its key, in PEM. The key is new, and never leaves the node."""

    chain: bytes
    private_key: bytes


def authority(secret: str) -> str:
    """Return the certificate of the authority, in PEM."""
    try:
        from cryptography.hazmat.primitives.serialization import Encoding
    except ImportError as error:
        raise missing(error) from error
    encoded: bytes = _authority(secret)[1].public_bytes(Encoding.PEM)
    return encoded.decode()


def node_certificate(secret: str, host: str) -> NodeCertificate:
    """Make a certificate for an IP address or a name."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    signing_key, signer = _authority(secret)
    key = ec.generate_private_key(ec.SECP256R1())
    try:
        name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        name = x509.DNSName(host)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{_NAME} node")]))
        .issuer_name(signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.SubjectAlternativeName([name]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False
        )
        .sign(signing_key, None)
    )
    return NodeCertificate(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _authority(secret: str):  # type: ignore[no-untyped-def]  # the types are those of an optional package
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(derived(secret, "authority"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(int.from_bytes(derived(secret, "serial number")[:15]))
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )
    return key, certificate


def missing(error: ImportError) -> FleetUnusable:
    """Make the error for a missing package of the extra."""
    return FleetUnusable(
        f"The package {error.name or 'ray'!r} is not installed, which a fleet needs.",
        remedy=f"Install it on this machine and on each node of the Ray cluster: {install_command('fleet')}",
    )
