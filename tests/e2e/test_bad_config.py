"""``llamasup serve`` with an invalid config: exit code 78, the errors, and no server is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.driver import run_to_end


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "lissten: 127.0.0.1:0\nmodels: {a: {path: demo}}",
            ":1: lissten: unknown key; did you mean listen?",
        ),
        ("models:\n  a: {path: demo}\n  a: {path: demo}", ":3: models.a: duplicate key, first in line 2"),
        ("models: {a: {path: demo, aliases: b}, b: {path: demo, aliases: a}}", "and the other way round"),
        (
            "models: {a: {path: demo}}\ngroups: {g: [a], h: [a]}",
            ":2: groups.h[0]: model 'a' is already in groups.g[0]",
        ),
        ("models: {../a: {path: demo}}", ":1: models: invalid name '../a': it contains '..'"),
        (
            "models: {a: {path: demo}}\nmemory: {ram: -1GiB}",
            ":2: memory.ram: invalid value '-1GiB': it is negative",
        ),
        ("models: {a: {path: '${NOT_SET_HERE}'}}", "the environment variable NOT_SET_HERE is not set"),
        ("a: &a [x, x]\nb: [*a, *a]", ":2: b[0]: invalid alias *a"),
        ("#" * 10_000_000, "the file has 10000000 bytes; a config has at most 1048576"),
        ("models: [", "invalid YAML"),
    ],
    ids=lambda text: text[:24],
)
def test_invalid_config_starts_no_server(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)

    ended = run_to_end("serve", "--config", str(path), "--port", "0")

    assert ended.returncode == 78
    assert ended.stdout == ""
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_public_address_needs_a_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("listen: 0.0.0.0:0\nmodels: {a: {path: demo}}\n")

    ended = run_to_end("serve", "--config", str(path))

    assert ended.returncode == 78
    assert "can be reached from other machines, and no API key is set" in ended.stderr


def test_missing_config_has_a_remedy(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "LLAMASUP_CONFIG"}

    ended = run_to_end("serve", env={**environ, "HOME": str(tmp_path)})

    assert ended.returncode == 78
    assert "No config was found" in ended.stderr
    assert "llamasup config init" in ended.stderr
