"""``llamasup serve`` with a config that cannot be meant: exit code 78, what is wrong, and nothing started."""

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
            ":1: lissten: there is no such key; the nearest is listen",
        ),
        ("models:\n  a: {path: demo}\n  a: {path: demo}", ":3: models.a: is given twice, first in line 2"),
        ("models: {a: {path: demo, aliases: b}, b: {path: demo, aliases: a}}", "and the other way round"),
        ("models: {a: {path: demo}}\ngroups: {g: [a], h: [a]}", ":2: groups.h[0]: 'a' is in groups.g[0] too"),
        ("models: {../a: {path: demo}}", ":1: models: '../a': it contains '..'"),
        ("models: {a: {path: demo}}\nmemory: {ram: -1GiB}", ":2: memory.ram: '-1GiB': it is below zero"),
        ("models: {a: {path: '${NOT_SET_HERE}'}}", "the environment has no NOT_SET_HERE"),
        ("a: &a [x, x]\nb: [*a, *a]", ":2: b[0]: the alias *a stands for what is said elsewhere"),
        ("#" * 10_000_000, "it has 10000000 bytes, and a config may have 1048576"),
        ("models: [", "this is no YAML"),
    ],
    ids=lambda text: text[:24],
)
def test_a_config_that_cannot_be_meant_starts_nothing(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)

    ended = run_to_end("serve", "--config", str(path), "--port", "0")

    assert ended.returncode == 78
    assert ended.stdout == ""
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("listen: 0.0.0.0:0\nmodels: {a: {path: demo}}\n")

    ended = run_to_end("serve", "--config", str(path))

    assert ended.returncode == 78
    assert "can be reached from other machines, and no API key is set" in ended.stderr


def test_without_a_config_it_says_how_to_get_one(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "LLAMASUP_CONFIG"}

    ended = run_to_end("serve", env={**environ, "HOME": str(tmp_path)})

    assert ended.returncode == 78
    assert "There is no config" in ended.stderr
    assert "llamasup config init" in ended.stderr
