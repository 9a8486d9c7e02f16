"""``llamasup serve`` with an invalid config: exit code 78, what is wrong, and nothing started."""

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
        ("models: [", "invalid YAML"),
        (
            "listen: 0.0.0.0:0\nmodels: {a: {path: demo}}",
            "can be reached from other machines, and no API key is set",
        ),
    ],
    ids=lambda text: text[:24],
)
def test_invalid_config_starts_nothing(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)

    ended = run_to_end("serve", "--config", str(path), "--port", "0")

    assert ended.returncode == 78
    assert ended.stdout == ""
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_missing_config_error_says_how_to_make_one(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "LLAMASUP_CONFIG"}

    ended = run_to_end("serve", env={**environ, "HOME": str(tmp_path)})

    assert ended.returncode == 78
    assert "No config was found" in ended.stderr
    assert "llamasup config init" in ended.stderr
