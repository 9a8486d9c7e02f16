from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamasup.core.auth.api_key import (
    ApiKey,
    KeyLimits,
    KeyLine,
    KeyRing,
    checked_name,
    digest_of,
    key_line,
    plain_keys,
    read_key_lines,
    stored_form,
    without_line,
)
from llamasup.errors import ConfigInvalid, UsageInvalid
from llamasup.features.wrap.command_line import read_key_file
from tests.kit.extent import examples

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


HASH = stored_form("one", "abcdefgh")


def read(text: str) -> tuple[KeyLine, ...]:
    return read_key_lines(text, "keys", salt=SALT)


def only(text: str) -> ApiKey:
    (line,) = read(text)
    return line.key


def opens(text: str, credential: str) -> bool:
    return KeyRing([line.key for line in read(text)]).find((credential.encode(),)) is not None


# --- valid files


def test_plain_line_is_an_inference_key_without_limits() -> None:
    key = only("sk-plain\n")
    assert key.name == "key-1"
    assert key.infers
    assert not key.controls
    assert not key.limits
    assert key.priority == "normal"


def test_all_attributes_of_a_key_are_read() -> None:
    key = only(
        "KEY name=alice rights=inference,control rpm=60 concurrent=2 tpm=20000 priority=high "
        "models=qwen*,org/tiny:Q4_K_M"
    )
    assert key.name == "alice"
    assert key.infers
    assert key.controls
    assert key.limits == KeyLimits(60, 2, 20000)
    assert key.priority == "high"
    assert key.models == ("qwen*", "org/tiny:Q4_K_M")
    assert opens("KEY name=alice", "KEY")
    assert not opens("KEY name=alice", "KEY name=alice")


def test_key_may_have_only_the_control_right() -> None:
    key = only("KEY rights=control")
    assert key.controls
    assert not key.infers


def test_comments_blank_lines_and_windows_line_ends_are_ignored() -> None:
    lines = read("\ufeff# team\r\n\r\none\t name=a  rpm=1 \r\n   \n  # more\n two\n")
    assert [(line.number, line.key.name) for line in lines] == [(3, "a"), (6, "key-1")]
    assert opens("\ufeffone\r\n", "one")


def test_keys_without_a_name_are_numbered() -> None:
    assert [line.key.name for line in read("one\ntwo name=b\nthree")] == ["key-1", "b", "key-2"]


def test_hash_matches_its_key() -> None:
    text = f"{HASH} name=bob\ntwo"
    assert [line.hashed for line in read(text)] == [True, False]
    assert opens(text, "one")
    assert opens(text, "two")
    assert not opens(text, HASH)


@pytest.mark.parametrize(
    "key", ["with space", "a=b", "=", "a==", "clé", "a,b;c", "a\tb", "x:y", "$a", "a # b"]
)
def test_unusual_keys_of_llama_server_work(key: str) -> None:
    """tests/real/test_keys.py shows that llama-server accepts them."""
    assert read_key_file(key + "\n") == (key,)
    assert opens(key + "\n", key)


# --- invalid files


@pytest.mark.parametrize(
    ("text", "line", "seen", "allowed"),
    [
        ("KEY nmae=alice", 1, "unknown attribute nmae= (did you mean name?)", "rpm="),
        ("a\n\n# c\nKEY RPM=60", 4, "unknown attribute RPM= (did you mean rpm?)", "rpm="),
        ("KEY zzz=alice", 1, "word 2 is an unknown attribute", "rights="),
        ("KEY name=a high", 1, "word 3 has no =", "priority="),
        ("KEY name=a priority high", 1, "priority is not followed by =", "priority="),
        ("KEY name = alice", 1, "name is not followed by =", "without blanks"),
        ("name=alice KEY", 1, "it begins with name=", "key comes first"),
        ("name=alice", 1, "it begins with name=", "key comes first"),
        ("name=alice rights=control", 1, "it begins with name=", "key comes first"),
        ("rpm=60 name=alice", 1, "it begins with rpm=", "key comes first"),
        ("KEY rpm=fast", 1, "rpm='fast'", "whole number from 1"),
        ("KEY rpm=0", 1, "rpm='0'", "whole number from 1"),
        ("KEY concurrent=-1", 1, "concurrent='-1'", "whole number"),
        ("KEY tpm=1e5", 1, "tpm='1e5'", "whole number"),
        ("KEY tpm=99999999999", 1, "tpm='99999999999'", "to 1000000000"),
        ("KEY tpm=٣", 1, "tpm='٣'", "whole number"),
        ("KEY rpm=" + "9" * 80, 1, "rpm='" + "9" * 40 + "…'", "whole number"),
        ("KEY rights=admin", 1, "rights='admin'", "inference, control"),
        ("KEY rights=node", 1, "rights='node'", "node needs inference"),
        ("KEY rights=control,node", 1, "rights='control,node'", "node needs inference"),
        ("KEY rights=", 1, "rights=''", "inference, control"),
        ("KEY rights=control,control", 1, "rights='control,control'", "inference, control"),
        ("KEY priority=urgent", 1, "priority='urgent'", "normal or high"),
        ("KEY models=", 1, "'' is not a valid model name", "separated by commas"),
        ("KEY models=a,,b", 1, "'' is not a valid model name", "separated by commas"),
        ("KEY models=[ab]*", 1, "'[ab]*' is not a valid model name", "separated by commas"),
        ("KEY models=" + ",".join("a" * 33), 1, "has 33 model names", "up to 32 names"),
        ("KEY rpm=1 rpm=2", 1, "rpm= occurs twice", "once"),
        ("KEY name=a/b", 1, "'a/b' is not a valid key name", "letters"),
        ("KEY name=key-1", 1, "is reserved for keys without a name", "another name"),
        ("KEY name=given-1", 1, "is reserved for keys without a name", "another name"),
        ("a name=x\nb name=x", 2, "name=x is already the name of line 1", "its own name"),
        ("a\nb\na rpm=5", 3, "the same key as in line 1", "Keep one"),
        (f"one\n{HASH} name=x", 2, "the same key as in line 1", "Keep one"),
        (f"{HASH} name=x\nz\none", 3, "the same key as in line 1", "Keep one"),
        (f"{HASH} name=x\n{HASH} name=y", 2, "the same key as in line 1", "Keep one"),
        ("a\x00b", 1, "control character", "HTTP header"),
        ("a\x7f", 1, "control character", "HTTP header"),
        ("sha256:short:00", 1, "is not a valid hash", "sha256:SALT:HEX"),
        (HASH.upper().replace("SHA256", "sha256"), 1, "is not a valid hash", "lower case"),
    ],
)
def test_error_names_file_line_value_and_remedy(text: str, line: int, seen: str, allowed: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read(text)
    assert caught.value.message.startswith(f"The API key file 'keys', line {line}: ")
    assert seen in caught.value.message
    assert allowed in caught.value.remedy
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("text", ["", "\n\n", "# none\n", "\ufeff", "   \r\n"])
def test_file_may_have_no_key(text: str) -> None:
    assert read(text) == ()


def test_number_of_keys_is_limited() -> None:
    thousand = "".join(f"key{number}\n" for number in range(1000))
    assert len(read(thousand)) == 1000
    with pytest.raises(ConfigInvalid, match=r"more than 1000 keys \(line 1001\)"):
        read(thousand + "more\n")


QUICKLY = settings(max_examples=examples(40))
WORDS = st.one_of(
    st.sampled_from(
        [
            "name=a",
            "name=b",
            "rpm=1",
            "tpm=x",
            "rights=control",
            "sha256:",
            "#",
            "=",
            "\t",
            "\r",
            "\ufeff",
            HASH,
        ]
    ),
    st.text(max_size=12),
)


@QUICKLY
@given(st.lists(st.lists(WORDS, max_size=5).map(" ".join), max_size=6).map("\n".join))
@example("\x1c\x1d a=\u2028b")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        lines = read(text)
    except ConfigInvalid:
        return
    numbers = [line.number for line in lines]
    assert numbers == sorted(set(numbers))
    assert len({line.key.name for line in lines}) == len(lines)
    assert all(text.split("\n")[number - 1] for number in numbers)  # U+0085 may be a key


SECRET = (
    st.from_regex(re.compile(r"[A-Z0-9=_ -]{12,30}"), fullmatch=True)
    .map(str.strip)
    .filter(lambda key: len(key) > 8)
)


@QUICKLY
@given(SECRET, st.lists(WORDS, max_size=4), st.booleans())
@example("MY KEY=WITH BLANKS", ["nothing"], True)
@example("SECRETSECRET NAME=SECRET", ["name=a"], False)
def test_no_message_shows_a_key(secret: str, behind: list[str], twice: bool) -> None:
    line = " ".join([secret, *behind])
    text = f"{line}\n{line}" if twice else line
    try:
        read(text)
    except ConfigInvalid as error:
        message = f"{error.message} {error.remedy}"
        for word in re.split(r"[ =]+", secret):
            if len(word) >= 5 and word.isalnum() and word not in "".join(behind):
                assert word not in message


# --- names and writing


@pytest.mark.parametrize("name", ["alice", "a", "A.b_c@d-e", "x" * 64, "key", "key-a"])
def test_valid_name(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a b", "a=b", "a,b", "é", "x" * 65, "key-7", "a\n"])
def test_invalid_name(name: str) -> None:
    with pytest.raises(UsageInvalid):
        checked_name(name)


@QUICKLY
@given(
    st.sampled_from([(True, False), (False, True), (True, True)]),
    st.sampled_from(["normal", "high"]),
    st.tuples(*[st.none() | st.integers(1, 10**9)] * 3),
    st.none() | st.just("saltsalt"),
    st.lists(st.sampled_from(["*", "qwen?", "org/repo:Q4_K_M"]), max_size=3).map(tuple),
)
def test_written_line_is_read_back(
    rights: tuple[bool, bool],
    priority: str,
    limits: tuple[int | None, ...],
    salt: str | None,
    models: tuple[str, ...],
) -> None:
    given = ApiKey("alice", b"", b"", *rights, KeyLimits(*limits), priority, models)  # type: ignore[arg-type]
    line = key_line(stored_form("the-key", salt), given)
    (found,) = read(line)
    assert found.hashed == (salt is not None)
    assert opens(line, "the-key")
    key = found.key
    assert (key.name, key.infers, key.controls, key.limits, key.priority, key.models) == (
        "alice",
        *rights,
        given.limits,
        priority,
        models,
    )


def test_removing_a_line_keeps_the_others() -> None:
    assert without_line("# a\r\n\r\none\r\ntwo", 3) == "# a\r\n\r\ntwo"
    assert without_line("one\ntwo", 2) == "one"
