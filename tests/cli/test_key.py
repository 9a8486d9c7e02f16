from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamasup.cli.commands import key as key_command
from llamasup.cli.commands.key import list_, new, revoke
from llamasup.core.auth.api_key import KeyRing, read_key_lines
from tests.cli.recording_view import RecordingView


class Result:
    """The output and the exit code of a command."""

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

    def new(self, name: str, **options: Any) -> Result:
        return self._result(new(name, file=self.path, **options))

    def list(self, *, json: bool = False) -> Result:
        return self._result(list_(self.path, json=json))

    def revoke(self, name: str, *, json: bool = False) -> Result:
        return self._result(revoke(name, self.path, json=json))

    def name_of(self, key: str) -> str | None:
        lines = read_key_lines(self.path.read_text(), "", salt=b"s")
        found = KeyRing([line.key for line in lines]).find((key.encode(),))
        return None if found is None else found.name

    def _result(self, code: int) -> Result:
        return Result(code, self._capfd.readouterr())


@pytest.fixture
def key(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Commands:
    return Commands(capfd, tmp_path / "keys")


def test_new_key_is_printed_alone_and_is_valid(key: Commands) -> None:
    result = key.new("alice")
    assert result.code == 0
    (made,) = result.out.splitlines()
    assert made.startswith("llamasup-")
    assert len(made) == len("llamasup-") + 43  # 256 bits
    serve = f"  → To require it: llamasup run MODEL --api-key-file {key.path}\n"
    assert result.err == f"Added the key 'alice' to {key.path}\n{serve}"
    assert key.name_of(made) == "alice"
    assert key.new("bob").out.strip() != made


def test_hashed_key_is_valid_and_not_in_the_file(key: Commands) -> None:
    first, second = key.new("alice", hashed=True), key.new("bob", hashed=True)
    assert "Save the key now" in first.err
    assert first.out.strip() not in key.path.read_text()
    assert key.name_of(first.out.strip()) == "alice"
    assert key.name_of(second.out.strip()) == "bob"
    salts = [line.split(":")[1] for line in key.path.read_text().splitlines()[1:]]
    assert len(set(salts)) == 1  # each further salt would cost one more hash per request


def test_options_of_a_key_are_in_the_file_and_in_the_list(key: Commands) -> None:
    options: dict[str, Any] = {"rpm": 60, "concurrent": 2, "tpm": 20000, "priority": "high"}
    made = key.new("alice", rights="control,inference", models="qwen*,tiny", json=True, **options).json
    assert made.pop("key") == key.path.read_text().splitlines()[1].split()[0]
    options |= {"models": ["qwen*", "tiny"]}
    expected = {"name": "alice", "rights": ["inference", "control"], "hashed": False, **options}
    assert made == {"file": str(key.path), **expected}
    assert key.list(json=True).json == {"file": str(key.path), "keys": [{"line": 2, **expected}]}


def test_models_need_inference_right_and_valid_names(key: Commands) -> None:
    result = key.new("ops", rights="control", models="tiny")
    assert result.code == 2
    assert "only a key for inference uses models" in result.err
    assert key.new("alice", models="a b").code == 2
    assert not key.path.exists()


def test_list_shows_names_and_never_a_key(key: Commands) -> None:
    secret = key.new("alice", rpm=5).out.strip()
    key.new("bob", rights="control", hashed=True)
    key.new("eve", models="qwen*,tiny")
    key.path.write_text(key.path.read_text() + "of-llama-servers\n")
    result = key.list()
    assert result.out.splitlines() == [
        "NAME   RIGHTS     RPM  CONCURRENT  TPM  PRIORITY  MODELS      HASHED",
        "alice  inference  5    -           -    normal    all         no",
        "bob    control    -    -           -    normal    all         yes",
        "eve    inference  -    -           -    normal    qwen*,tiny  no",
        "key-1  inference  -    -           -    normal    all         no",
    ]
    for text in (result.out, key.list(json=True).out):
        assert secret not in text
        assert "of-llama-servers" not in text
        assert "sha256" not in text


def test_list_without_file_is_empty(key: Commands) -> None:
    assert key.list(json=True).json == {"file": str(key.path), "keys": []}
    result = key.list()
    assert (result.code, result.out, result.err) == (0, "", f"{key.path} does not exist.\n")
    key.path.write_text("# nothing yet\n")
    assert key.list().err == f"{key.path} contains no keys.\n"
    assert key.new("alice").code == 0
    assert key.path.read_text().startswith("# nothing yet\n")


def test_revoke_removes_the_line_of_the_key_only(key: Commands) -> None:
    before = "# team\r\nfirst name=a\r\n\r\n# ours\r\nsecond name=b rpm=5\r\nthird"
    key.path.write_bytes(before.encode())
    result = key.revoke("b", json=True)
    assert result.json == {"name": "b", "file": str(key.path), "revoked": True}
    assert key.path.read_bytes().decode() == before.replace("second name=b rpm=5\r\n", "")
    assert key.revoke("key-1").code == 0  # one without a name
    assert key.new("d").code == 0
    assert key.path.read_bytes().startswith(b"# team\r\nfirst name=a\r\n\r\n# ours\r\n")


def test_unfinished_last_line_gets_its_newline(key: Commands) -> None:
    key.path.write_text("first")
    made = key.new("alice").out.strip()
    assert key.path.read_text() == f"first\n{made} name=alice\n"


@pytest.mark.parametrize(
    ("act", "code", "says"),
    [
        (lambda key: key.new("a"), 2, "already has a key 'a'"),
        (lambda key: key.new("a"), 2, "llamasup key revoke a --file {path}"),
        (lambda key: key.new("b b"), 2, "'b b' is not a valid key name"),
        (lambda key: key.new("key-1"), 2, "is reserved for keys without a name"),
        (lambda key: key.new("b", rights="control", rpm=1), 2, "limits apply to requests to models"),
        (lambda key: key.revoke("aa"), 2, "Did you mean 'a'?"),
        (lambda key: key.revoke("zzzzzz"), 2, "`llamasup key list --file {path}`"),
    ],
)
def test_invalid_command_is_refused_and_changes_nothing(
    key: Commands, act: Any, code: int, says: str
) -> None:
    key.path.write_text("one name=a\ntwo name=ab\n")
    result = act(key)
    assert result.code == code
    assert says.format(path=key.path) in result.err
    assert result.out == ""
    assert key.path.read_text() == "one name=a\ntwo name=ab\n"


def test_revoke_of_last_key_says_that_all_requests_are_refused(key: Commands) -> None:
    key.path.write_text("# team\none name=a\n")
    result = key.revoke("a")
    assert result.code == 0
    assert result.err.splitlines() == [
        f"Removed the key 'a' from {key.path}",
        "  → This was the last key: with this file, every request is refused and no service starts.",
    ]
    assert key.path.read_text() == "# team\n"
    assert key.list().err == f"{key.path} contains no keys.\n"
    assert key.new("b").code == 0


def test_revoke_without_file_is_refused(key: Commands) -> None:
    result = key.revoke("a")
    assert result.code == 2
    assert "contains no keys" in result.err
    assert not key.path.exists()


@pytest.mark.parametrize(
    "act",
    [lambda key: key.new("b"), lambda key: key.list(), lambda key: key.revoke("a")],
    ids=["new", "list", "revoke"],
)
def test_invalid_file_is_refused_with_its_line(key: Commands, act: Any) -> None:
    key.path.write_text("one name=a\nsecret rpm=x\n")
    result = act(key)
    assert result.code == 78
    assert f"{str(key.path)!r}, line 2: invalid rpm='x'" in result.err
    assert "secret" not in result.err
    assert key.path.read_text() == "one name=a\nsecret rpm=x\n"


def test_unwritable_folder_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    result = Commands(capfd, Path("/proc/no-such/keys")).new("a")
    assert result.code == 71
    assert "/proc/no-such/keys" in result.err
    assert result.out == ""  # a key that was not stored must not be printed


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("LoadCredential=api-keys:{path}", True),
        ("LoadCredential=api-keys:{path}.old", False),
        ("# LoadCredential=api-keys:{path}", False),
    ],
)
def test_service_that_has_a_copy_of_the_file_is_named(line: str, says: bool, tmp_path: Path) -> None:
    path, view = tmp_path / "keys", RecordingView()
    (tmp_path / "llamasup-qwen.service").write_text(f"[Service]\n{line.format(path=path)}\n")
    (tmp_path / "other.service").write_text(f"LoadCredential=x:{path}\n")
    key_command._say_restarts(view, path, tmp_path)
    restart = "  → llamasup-qwen reads the file when it starts: systemctl restart llamasup-qwen"
    assert view.texts == ([restart] if says else [])
