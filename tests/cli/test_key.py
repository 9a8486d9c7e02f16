from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamasup.auth.key_file import read_key_lines
from llamasup.auth.keys import KeyRing
from llamasup.cli.commands.key import list_, new, revoke


class Said:
    """What a command wrote, and its exit code."""

    def __init__(self, code: int, captured: Any) -> None:
        self.code = code
        self.out: str = captured.out
        self.err: str = captured.err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Commands:
    def __init__(self, capfd: pytest.CaptureFixture[str], path: Path) -> None:
        self._capfd = capfd
        self.path = path

    def new(self, name: str, **options: Any) -> Said:
        return self._said(new(name, file=self.path, **options))

    def list(self, *, json: bool = False) -> Said:
        return self._said(list_(self.path, json=json))

    def revoke(self, name: str, *, json: bool = False) -> Said:
        return self._said(revoke(name, self.path, json=json))

    def opens(self, key: str) -> str | None:
        lines = read_key_lines(self.path.read_text(), "", salt=b"s")
        found = KeyRing([line.key for line in lines]).find((key.encode(),))
        return None if found is None else found.name

    def _said(self, code: int) -> Said:
        return Said(code, self._capfd.readouterr())


@pytest.fixture
def key(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Commands:
    return Commands(capfd, tmp_path / "keys")


def test_a_new_key_is_printed_alone_and_opens(key: Commands) -> None:
    said = key.new("alice")
    assert said.code == 0
    (made,) = said.out.splitlines()
    assert made.startswith("llamasup-")
    assert len(made) == len("llamasup-") + 43  # 256 bits
    serve = f"  → To require it: llamasup run MODEL --api-key-file {key.path}\n"
    assert said.err == f"Added the key 'alice' to {key.path}\n{serve}"
    assert key.opens(made) == "alice"
    assert key.new("bob").out.strip() != made


def test_a_hashed_key_is_not_in_the_file_and_opens(key: Commands) -> None:
    first, second = key.new("alice", hashed=True), key.new("bob", hashed=True)
    assert "Save it now" in first.err
    assert first.out.strip() not in key.path.read_text()
    assert key.opens(first.out.strip()) == "alice"
    assert key.opens(second.out.strip()) == "bob"
    salts = [line.split(":")[1] for line in key.path.read_text().splitlines()[1:]]
    assert len(set(salts)) == 1  # each further one would cost every request a hash


def test_everything_that_is_said_of_a_key_is_in_the_file_and_in_the_list(key: Commands) -> None:
    options: dict[str, Any] = {"rpm": 60, "concurrent": 2, "tpm": 20000, "priority": "high"}
    made = key.new("alice", rights="control,inference", models="qwen*,tiny", json=True, **options).json
    assert made.pop("key") == key.path.read_text().splitlines()[1].split()[0]
    options |= {"models": ["qwen*", "tiny"]}
    expected = {"name": "alice", "rights": ["inference", "control"], "hashed": False, **options}
    assert made == {"file": str(key.path), **expected}
    assert key.list(json=True).json == {"file": str(key.path), "keys": [{"line": 2, **expected}]}


def test_models_are_for_a_key_that_may_infer_and_have_names_as_models_have(key: Commands) -> None:
    said = key.new("ops", rights="control", models="tiny")
    assert said.code == 2
    assert "only a key for inference uses models" in said.err
    assert key.new("alice", models="a b").code == 2
    assert not key.path.exists()


def test_a_list_shows_names_and_never_a_key(key: Commands) -> None:
    secret = key.new("alice", rpm=5).out.strip()
    key.new("bob", rights="control", hashed=True)
    key.new("eve", models="qwen*,tiny")
    key.path.write_text(key.path.read_text() + "of-llama-servers\n")
    said = key.list()
    assert said.out.splitlines() == [
        "NAME   RIGHTS     RPM  CONCURRENT  TPM  PRIORITY  MODELS      HASHED",
        "alice  inference  5    -           -    normal    all         no",
        "bob    control    -    -           -    normal    all         yes",
        "eve    inference  -    -           -    normal    qwen*,tiny  no",
        "key-1  inference  -    -           -    normal    all         no",
    ]
    for text in (said.out, key.list(json=True).out):
        assert secret not in text
        assert "of-llama-servers" not in text
        assert "sha256" not in text


def test_without_a_file_the_list_is_empty(key: Commands) -> None:
    assert key.list(json=True).json == {"file": str(key.path), "keys": []}
    said = key.list()
    assert (said.code, said.out, said.err) == (0, "", f"{key.path} does not exist.\n")
    key.path.write_text("# nothing yet\n")
    assert key.list().err == f"{key.path} contains no keys.\n"
    assert key.new("alice").code == 0
    assert key.path.read_text().startswith("# nothing yet\n")


def test_a_revoked_key_goes_and_everything_else_stays(key: Commands) -> None:
    before = "# team\r\nfirst name=a\r\n\r\n# ours\r\nsecond name=b rpm=5\r\nthird"
    key.path.write_bytes(before.encode())
    said = key.revoke("b", json=True)
    assert said.json == {"name": "b", "file": str(key.path), "revoked": True}
    assert key.path.read_bytes().decode() == before.replace("second name=b rpm=5\r\n", "")
    assert key.revoke("key-1").code == 0  # one without a name
    assert key.new("d").code == 0
    assert key.path.read_bytes().startswith(b"# team\r\nfirst name=a\r\n\r\n# ours\r\n")


def test_a_line_without_an_end_gets_one(key: Commands) -> None:
    key.path.write_text("first")
    made = key.new("alice").out.strip()
    assert key.path.read_text() == f"first\n{made} name=alice\n"


@pytest.mark.parametrize(
    ("act", "code", "says"),
    [
        (lambda key: key.new("a"), 2, "already has a key 'a'"),
        (lambda key: key.new("b b"), 2, "'b b' is not a valid key name"),
        (lambda key: key.new("key-1"), 2, "is reserved for keys without a name"),
        (lambda key: key.new("b", rights="control", rpm=1), 2, "limits apply to requests to models"),
        (lambda key: key.revoke("aa"), 2, "Did you mean 'a'?"),
        (lambda key: key.revoke("zzzzzz"), 2, "`llamasup key list`"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(
    key: Commands, act: Any, code: int, says: str
) -> None:
    key.path.write_text("one name=a\ntwo name=ab\n")
    said = act(key)
    assert said.code == code
    assert says in said.err
    assert said.out == ""
    assert key.path.read_text() == "one name=a\ntwo name=ab\n"


def test_the_last_key_goes_too_and_what_follows_is_said(key: Commands) -> None:
    key.path.write_text("# team\none name=a\n")
    said = key.revoke("a")
    assert said.code == 0
    assert said.err.splitlines() == [
        f"Removed the key 'a' from {key.path}",
        "  → This was the last key: with this file no client gets access, and no service starts.",
    ]
    assert key.path.read_text() == "# team\n"
    assert key.list().err == f"{key.path} contains no keys.\n"
    assert key.new("b").code == 0


def test_from_no_file_nothing_is_revoked(key: Commands) -> None:
    said = key.revoke("a")
    assert said.code == 2
    assert "contains no keys" in said.err
    assert not key.path.exists()


@pytest.mark.parametrize(
    "act",
    [lambda key: key.new("b"), lambda key: key.list(), lambda key: key.revoke("a")],
    ids=["new", "list", "revoke"],
)
def test_a_file_with_a_mistake_is_refused_with_its_line(key: Commands, act: Any) -> None:
    key.path.write_text("one name=a\nsecret rpm=x\n")
    said = act(key)
    assert said.code == 78
    assert f"{str(key.path)!r}, line 2: invalid rpm='x'" in said.err
    assert "secret" not in said.err
    assert key.path.read_text() == "one name=a\nsecret rpm=x\n"


def test_a_folder_that_cannot_be_written_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    said = Commands(capfd, Path("/proc/no-such/keys")).new("a")
    assert said.code == 71
    assert "/proc/no-such/keys" in said.err
    assert said.out == ""  # a key that is nowhere must not be taken for one
