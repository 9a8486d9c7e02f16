"""The unit of a service as text. That systemd takes it, and what it scores, is in tests/features/systemd."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.errors import UsageInvalid
from llamasup.features.systemd.unit_file import (
    Credential,
    Unit,
    checked_name,
    is_hidden,
    is_home,
    is_ours,
    name_for,
    own_folders,
    unit_text,
)

_PROGRAM = ("/opt/venv/bin/python", "-m", "llamasup")
PLAIN = Unit("qwen", (*_PROGRAM, "run", "/srv/qwen.gguf"), (*_PROGRAM, "reload", "--pid"), 30.0, 10.0)

_KEYS = Credential("--api-key-file", "/etc/my keys")


def settings(unit: Unit, name: str) -> list[str]:
    lines = unit_text(unit).splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def test_own_unit_is_recognized_by_its_first_line() -> None:
    assert is_ours(unit_text(PLAIN))
    assert not is_ours("[Unit]\nDescription=another\n")
    assert not is_ours("\n" + unit_text(PLAIN))


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("/srv/qwen.gguf", "/srv/qwen.gguf"),
        ("/srv/a b.gguf", '"/srv/a b.gguf"'),
        ("50%", "50%%"),
        ("$HOME", "$$HOME"),
        ('say "hi"', '"say \\"hi\\""'),
        ("back\\slash", '"back\\\\slash"'),
        (";", '";"'),
        ("", '""'),
        ("é", "é"),
    ],
)
def test_arguments_reach_llamasup_unchanged(word: str, spelled: str) -> None:
    """systemd.syntax(7), Quoting; tests/features/systemd runs one for real."""
    unit = replace(PLAIN, command=("/bin/run", word))
    assert settings(unit, "ExecStart") == [f"/bin/run {spelled}"]


def test_program_path_is_not_expanded() -> None:
    assert settings(replace(PLAIN, command=("/a $b/100%", "x")), "ExecStart") == ['"/a $b/100%%" x']


@pytest.mark.parametrize("word", ["line\nfeed", "\x1b[2J", "not utf-8 \udcff"])
def test_path_that_a_unit_cannot_contain_is_rejected(word: str) -> None:
    with pytest.raises(UsageInvalid, match="not allowed in a systemd unit"):
        unit_text(replace(PLAIN, command=("/bin/run", word)))


@pytest.mark.parametrize("path", ['/home/a"b.gguf', "/home/a\\b.gguf"])
def test_path_in_a_home_has_no_escapes(path: str) -> None:
    with pytest.raises(UsageInvalid, match="not allowed in a systemd unit"):
        unit_text(replace(PLAIN, needed_paths=(path,)))


def test_only_needed_files_of_hidden_folders_are_visible() -> None:
    paths = ("/srv/m.gguf", "/home/u/50% m.gguf", "/home/u/venv", "/home/u/venv/lib/llamasup", "/tmp/x")  # noqa: S108
    assert settings(replace(PLAIN, needed_paths=paths), "BindReadOnlyPaths") == [
        '"-/home/u/50%% m.gguf"',
        '"-/home/u/venv"',
        '"-/tmp/x"',
    ]
    assert is_hidden("/root/x")
    assert not is_hidden("/homes/x")


def test_systemd_passes_the_key_file_as_a_credential() -> None:
    unit = replace(PLAIN, credentials=(_KEYS,), command=(*PLAIN.command, "--", "--temp", "1"))
    assert settings(unit, "LoadCredential") == ["api-key-file:/etc/my keys"]
    assert settings(unit, "ExecStart")[0].endswith("--api-key-file %d/api-key-file -- --temp 1")
    own = replace(unit, of_user=True)
    assert settings(own, "LoadCredential") == []
    assert settings(own, "ExecStart")[0].endswith('--api-key-file "/etc/my keys" -- --temp 1')
    plain = replace(PLAIN, credentials=(_KEYS,))
    assert settings(plain, "ExecStart")[0].endswith("/srv/qwen.gguf --api-key-file %d/api-key-file")


@pytest.mark.parametrize("path", ["/etc/keys\\", "/etc/keys ", "/etc/keys\nExecStartPre=/bin/x"])
def test_key_file_name_with_a_trailing_backslash_is_rejected(path: str) -> None:
    with pytest.raises(UsageInvalid, match="not allowed in a systemd unit"):
        unit_text(replace(PLAIN, credentials=(Credential("--tls-key", path),)))


def test_dynamic_user_unless_one_is_given() -> None:
    assert settings(PLAIN, "DynamicUser") == ["yes"]
    named = replace(PLAIN, run_as="ai", groups=("render", "video"))
    assert (settings(named, "DynamicUser"), settings(named, "User")) == ([], ["ai"])
    assert settings(named, "SupplementaryGroups") == ["render video"]
    assert settings(PLAIN, "SupplementaryGroups") == []


def test_local_service_cannot_reach_other_machines() -> None:
    assert settings(PLAIN, "IPAddressDeny") == ["any"]
    assert settings(PLAIN, "After") == ["network.target nvidia-persistenced.service"]
    outside = replace(PLAIN, is_local=False)
    assert settings(outside, "IPAddressDeny") == []
    assert settings(outside, "Wants") == ["network-online.target"]


def test_downloading_service_reaches_other_machines_after_network_start() -> None:
    unit = replace(PLAIN, downloads=True)
    assert settings(unit, "IPAddressDeny") == []
    assert settings(unit, "Wants") == ["network-online.target"]
    assert unit.is_local


def test_written_folders_are_writable_and_not_read_only() -> None:
    unit = replace(
        PLAIN,
        needed_paths=("/home/u/models", "/home/u/models/new/x.gguf", "/home/u/x", "/home/u/x/y.gguf"),
        written_folders=("/srv/50% new", "/home/u/models/new", "/home/u/x", "/srv/50% new/below"),
    )
    assert settings(unit, "BindReadOnlyPaths") == ['"-/home/u/models"']
    assert settings(unit, "BindPaths") == ['"-/home/u/models/new"', '"-/home/u/x"']
    assert settings(unit, "ReadWritePaths") == ['"-/srv/50%% new"']
    assert settings(PLAIN, "ReadWritePaths") == settings(PLAIN, "BindPaths") == []
    own = unit_text(replace(unit, of_user=True))
    assert "Bind" not in own
    assert "ReadWritePaths" not in own


@pytest.mark.parametrize("of_many", [False, True])
def test_unit_explains_reload_of_one_and_of_many_models(of_many: bool) -> None:
    text = unit_text(replace(PLAIN, of_many=of_many))
    assert ("# Restarts the model" in text) is not of_many
    assert ("# Reads the config again" in text) is of_many
    assert ("each preloaded model" in text) is of_many


@pytest.mark.parametrize("folder", ["/root", "/home", "/home/alice", "/tmp", "/run/user/1000"])  # noqa: S108
def test_config_directly_in_a_home_is_rejected(folder: str) -> None:
    assert is_home(folder)
    assert not is_home(f"{folder}/llamasup/served")


def test_each_service_has_its_own_folders() -> None:
    state, cache, run = own_folders("qwen")
    text = unit_text(PLAIN)
    assert (state, cache, run) == ("/var/lib/llamasup/qwen", "/var/cache/llamasup/qwen", "/run/llamasup/qwen")
    for kind in ("State", "Cache", "Runtime"):
        assert f"{kind}Directory=llamasup/qwen\n" in text


def test_systemd_waits_longer_than_drain_and_stop_may_take() -> None:
    assert settings(replace(PLAIN, drain_timeout_s=120, stop_timeout_s=5), "TimeoutStopSec") == ["140"]


@pytest.mark.parametrize(
    ("version", "kind", "reload", "steps"),
    [(252, "notify", 1, 0), (253, "notify-reload", 0, 0), (254, "notify-reload", 0, 1)],
)
def test_features_of_newer_systemd_are_used(version: int, kind: str, reload: int, steps: int) -> None:
    unit = replace(PLAIN, systemd_version=version)
    assert settings(unit, "Type") == [kind]
    assert settings(unit, "ExecReload") == ["/opt/venv/bin/python -m llamasup reload --pid $MAINPID"] * reload
    assert len(settings(unit, "ReloadSignal")) == 1 - reload
    assert len(settings(unit, "RestartSteps")) == steps


def test_user_unit_needs_neither_root_nor_namespaces() -> None:
    text = unit_text(replace(PLAIN, of_user=True))
    for setting in (
        "DynamicUser",
        "Private",
        "Protect",
        "CapabilityBoundingSet",
        "Bind",
        "Device",
        "multi-user",
    ):
        assert setting not in text
    assert "SystemCallFilter=@system-service" in text
    assert "WantedBy=default.target" in text
    assert "systemctl --user edit" in text


@pytest.mark.parametrize(
    ("model", "alias", "name"),
    [
        ("/srv/Qwen2.5 7B.gguf", None, "Qwen2.5-7B"),
        ("/srv/big-00001-of-00003.gguf", None, "big"),
        ("qwen", None, "qwen"),
        ("Qwen2.5-7B", None, "Qwen2.5-7B"),
        ("/srv/x.gguf", "org/best,other", "org-best"),
        ("/srv/100%.gguf", None, "100"),
        ("/srv/é.gguf", None, "model"),
        ("/srv/" + "a" * 60 + ".gguf", None, "a" * 40),
        ("demo", None, "demo"),
    ],
)
def test_service_is_named_after_its_model(model: str, alias: str | None, name: str) -> None:
    assert name_for(model, alias) == name
    assert name_for(name) == name
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "x" * 41, ".hidden", "-x", "50%", "a\n"])
def test_invalid_service_name_is_rejected(name: str) -> None:
    with pytest.raises(UsageInvalid, match="is not a valid name for a service"):
        checked_name(name)


def test_unit_file_is_named_after_the_service() -> None:
    assert PLAIN.file_name == "llamasup-qwen.service"


def test_service_with_other_nodes_reaches_the_network() -> None:
    unit = replace(PLAIN, has_nodes=True)
    assert settings(unit, "IPAddressDeny") == []
    assert settings(unit, "Wants") == ["network-online.target"]
