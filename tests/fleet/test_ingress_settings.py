"""What the ingress of a fleet learns from a config, and which one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.auth.api_key import KeyRing
from llamasup.errors import ConfigInvalid, UnsafeBind
from llamasup.fleet.ingress import IngressSettings
from llamasup.fleet.ingress_settings import ingress_settings, refuse_without_key
from tests.kit.configs import load

SECRET = "s" * 40
FLEET = "models: {tiny: {repo: org/tiny}}\nfleet: {ingress: true, directory: 'http://head:8000'}\n"


def settings_of(folder: Path, more: str = "", **environ: str) -> IngressSettings | None:
    path = folder / "config.yaml"
    path.write_text(FLEET + more)
    return ingress_settings(load(path, environ), SECRET, environ)


def test_there_is_no_ingress_unless_the_config_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("models: {tiny: {repo: org/tiny}}")
    assert ingress_settings(load(path, {}), SECRET, {}) is None


def test_settings_are_those_of_a_front_with_only_digests_of_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-of-alice name=alice models=tiny\nsk-of-bob\n")
    keys.chmod(0o600)
    more = (
        "auth: {api_key_file: keys}\nhttp: {allow_hosts: [llm.example.net], remote_media: [example.org]}\n"
        "defaults: {wait_timeout: 5s, max_queued: 7}"
    )
    found = settings_of(tmp_path, more, LLAMASUP_API_KEY="sk-of-carol")
    assert found is not None
    ring = KeyRing(found.keys)
    words = ("alice", "bob", "carol")
    known = [key for word in words if (key := ring.find((f"sk-of-{word}".encode(),))) is not None]
    assert [key.name for key in known] == ["alice", "key-1", "given-1"]
    assert found.hosts == ("llm.example.net", "head")
    assert (found.remote_media, found.wait_timeout_s, found.max_queued) == (("example.org",), 5.0, 7)
    assert settings_of(tmp_path, more, LLAMASUP_API_KEY="sk-of-carol") == found, "no salt of this process"


def test_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ConfigInvalid, match="has no keys"):
        settings_of(tmp_path, "auth: {api_key_file: keys}")


@pytest.mark.check("X1", "exit code 78")
def test_ingress_of_ray_serve_without_keys_is_refused_on_addresses_that_other_machines_reach(
    tmp_path: Path,
) -> None:
    without = settings_of(tmp_path)
    assert without is not None
    for host in ("0.0.0.0", "192.0.2.1", "head"):
        with pytest.raises(UnsafeBind, match=rf"Ray Serve at {host}:8000 serves") as refused:
            refuse_without_key(without, host, 8000)
        assert refused.value.exit_code == 78
        assert "auth.api_key_file" in refused.value.remedy
    refuse_without_key(without, "127.0.0.1", 8000)
    accepted = settings_of(tmp_path, "auth: {insecure_no_auth: true}")
    with_key = settings_of(tmp_path, LLAMASUP_API_KEY="sk-of-carol")
    for settings in (accepted, with_key):
        assert settings is not None
        refuse_without_key(settings, "0.0.0.0", 8000)
