from __future__ import annotations

import subprocess

import pytest

from llamasup.auth.keys import ApiKey, KeyRing, digest_of, plain_keys

SALT = b"0123456789abcdef"


def key(name: str, text: str, *, salt: bytes = SALT, controls: bool = False) -> ApiKey:
    return ApiKey(name, salt, digest_of(salt, text.encode()), controls=controls)


def found(ring: KeyRing, *credentials: bytes) -> str | None:
    which = ring.find(credentials)
    return None if which is None else which.name


def test_a_ring_says_which_key_a_credential_is() -> None:
    ring = KeyRing([key("a", "one"), key("b", "two"), key("c", "three", salt=b"another-salt")])
    assert found(ring, b"one") == "a"
    assert found(ring, b"two") == "b"
    assert found(ring, b"three") == "c"
    assert found(ring, b"four") is None
    assert found(ring, b"") is None
    assert found(ring) is None


def test_nothing_is_no_key_whatever_a_file_says() -> None:
    """The hash of a variable that was not set, say."""
    ring = KeyRing([key("a", ""), key("b", "two")])
    assert found(ring, b"") is None
    assert found(ring, b"", b"two") == "b"


def test_of_two_credentials_the_first_that_is_a_key_counts() -> None:
    ring = KeyRing([key("a", "one"), key("b", "two")])
    assert found(ring, b"placeholder", b"two") == "b"
    assert found(ring, b"two", b"one") == "b"


def test_of_a_key_that_is_there_twice_the_first_entry_counts() -> None:
    assert found(KeyRing([key("a", "one"), key("b", "one")]), b"one") == "a"
    assert found(KeyRing([key("a", "one", salt=b"another-salt"), key("b", "one")]), b"one") == "a"


def test_no_more_credentials_are_looked_at_than_an_honest_client_sends() -> None:
    ring = KeyRing([key("a", "one")])
    assert found(ring, b"1", b"2", b"3", b"one") == "a"
    assert found(ring, b"1", b"2", b"3", b"4", b"one") is None


def test_a_ring_knows_whether_any_key_controls() -> None:
    assert not KeyRing([]).controls
    assert not KeyRing([key("a", "one")]).controls
    assert KeyRing([key("a", "one"), key("b", "two", controls=True)]).controls


def test_keys_without_a_file_may_infer_and_are_numbered() -> None:
    keys = plain_keys(("one", "two", "one"), SALT)
    assert [each.name for each in keys] == ["given-1", "given-2"]
    assert all(each.infers and not each.controls and not each.limits for each in keys)


def test_a_key_of_bytes_that_are_no_text_is_compared_as_bytes() -> None:
    assert found(KeyRing(plain_keys(("\udcff",), SALT)), b"\xff") == "given-1"


def test_what_a_key_is_printed_as_says_nothing_of_it() -> None:
    shown = repr(key("a", "one"))
    assert digest_of(SALT, b"one").hex() not in shown
    assert SALT.decode() not in shown
    assert "digest" not in shown


def test_a_hash_can_be_made_with_the_tools_of_any_machine() -> None:
    made = subprocess.run(
        ["sh", "-c", 'printf %s "$SALT$KEY" | sha256sum'],
        env={"SALT": "abcdefgh", "KEY": "one", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert made.stdout.split()[0] == digest_of(b"abcdefgh", b"one").hex()


@pytest.mark.parametrize("text", ["a", "two words", "clé", "x" * 5000])
def test_any_text_is_a_key(text: str) -> None:
    assert found(KeyRing([key("a", text)]), text.encode()) == "a"
