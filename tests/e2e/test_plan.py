"""``llamasup plan`` as a person reads it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.e2e.driver import run_to_end


def test_a_variable_that_llamasup_sets_is_shown_with_its_reason_and_others_without(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    done = run_to_end(
        *("plan", str(tiny_model), "--runtime", fake_server()), env={**os.environ, "OMP_PLACES": "cores"}
    )
    assert done.returncode == 0, done.stderr
    _, environment = done.stdout.split("\n\nEnvironment:\n")
    lines = environment.split("\n\n")[0].split("\n")
    assert "  OMP_PLACES=cores" in lines
    (spin,) = [line for line in lines if "GOMP_SPINCOUNT" in line]
    assert re.fullmatch(r"  GOMP_SPINCOUNT=3000 +\S.* sleeps soon.*", spin)


def test_how_threads_wait_is_left_to_a_user_who_says_it(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    done = run_to_end(
        *("plan", str(tiny_model), "--runtime", fake_server(), "--json"),
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    shown = json.loads(done.stdout)
    assert shown["env"]["OMP_WAIT_POLICY"] == "passive"
    assert "GOMP_SPINCOUNT" not in shown["env"]
    assert set(shown["env_reasons"]) <= set(shown["env"])
