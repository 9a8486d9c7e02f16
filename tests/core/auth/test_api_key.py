from __future__ import annotations

import subprocess

import pytest

from llamasup.core.auth.api_key import ApiKey, KeyRing, digest_of, plain_keys

SALT = b"0123456789abcdef"


def key(name: str, text: str, *, salt: bytes = SALT, controls: bool = False) -> ApiKey:
    return ApiKey(name, salt, digest_of(salt, text.encode()), controls=controls)


def found(ring: KeyRing, *credentials: bytes) -> str | None:
    match = ring.find(credentials)
    return None if match is None else match.name


def test_ring_finds_the_key_of_a_credential() -> None:
    ring = KeyRing([key("a", "one"), key("b", "two"), key("c", "three", salt=b"another-salt")])
    assert found(ring, b"one") == "a"
    assert found(ring, b"two") == "b"
    assert found(ring, b"three") == "c"
    assert found(ring, b"four") is None
    assert found(ring, b"") is None
    assert found(ring) is None


def test_empty_credential_never_matches() -> None:
    """A file may have the hash of an unset variable."""
    ring = KeyRing([key("a", ""), key("b", "two")])
    assert found(ring, b"") is None
    assert found(ring, b"", b"two") == "b"


def test_first_valid_credential_applies() -> None:
    ring = KeyRing([key("a", "one"), key("b", "two")])
    assert found(ring, b"placeholder", b"two") == "b"
    assert found(ring, b"two", b"one") == "b"


def test_first_of_two_entries_for_a_key_applies() -> None:
    assert found(KeyRing([key("a", "one"), key("b", "one")]), b"one") == "a"
    assert found(KeyRing([key("a", "one", salt=b"another-salt"), key("b", "one")]), b"one") == "a"


def test_number_of_compared_credentials_is_limited() -> None:
    ring = KeyRing([key("a", "one")])
    assert found(ring, b"1", b"2", b"3", b"one") == "a"
    assert found(ring, b"1", b"2", b"3", b"4", b"one") is None


def test_ring_knows_whether_a_key_has_the_control_right() -> None:
    assert not KeyRing([]).controls
    assert not KeyRing([key("a", "one")]).controls
    assert KeyRing([key("a", "one"), key("b", "two", controls=True)]).controls


def test_keys_without_a_file_are_numbered_inference_keys() -> None:
    keys = plain_keys(("one", "two", "one"), SALT)
    assert [key.name for key in keys] == ["given-1", "given-2"]
    assert all(key.infers and not key.controls and not key.limits for key in keys)


def test_key_that_is_not_utf8_is_compared_as_bytes() -> None:
    assert found(KeyRing(plain_keys(("\udcff",), SALT)), b"\xff") == "given-1"


def test_repr_of_a_key_hides_salt_and_digest() -> None:
    shown = repr(key("a", "one"))
    assert digest_of(SALT, b"one").hex() not in shown
    assert SALT.decode() not in shown
    assert "digest" not in shown


def test_hash_can_be_made_with_sha256sum() -> None:
    made = subprocess.run(
        ["sh", "-c", 'printf %s "$SALT$KEY" | sha256sum'],
        env={"SALT": "abcdefgh", "KEY": "one", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert made.stdout.split()[0] == digest_of(b"abcdefgh", b"one").hex()


@pytest.mark.parametrize("text", ["a", "two words", "clé", "x" * 5000])
def test_any_text_may_be_a_key(text: str) -> None:
    assert found(KeyRing([key("a", text)]), text.encode()) == "a"
