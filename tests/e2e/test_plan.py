"""``llamasup plan`` in its text form."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.e2e.driver import command, on_terminal, run_to_end


def test_plan_shows_reasons_only_for_variables_set_by_llamasup(
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
    assert re.fullmatch(r"  GOMP_SPINCOUNT=3000 +\S.* sleep soon.*", spin)


def test_polling_of_threads_set_by_the_user_is_kept(
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep file names in UTF-8")
def test_plan_json_of_a_path_outside_utf8_is_strictly_valid(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    shutil.copy(tiny_model, path)
    done = run_to_end("plan", str(path), "--runtime", fake_server(), "--json")
    shown = msgspec.json.decode(done.stdout.encode())  # refuses half a surrogate pair
    escaped = f"{tmp_path}/caf\\xe9.gguf"
    assert shown["model"] == escaped
    assert escaped in shown["argv"]


def test_reasons_are_wrapped_between_words_on_a_narrow_terminal(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    arguments = command("plan", str(tiny_model), "--runtime", fake_server())
    why = on_terminal(arguments, 70).split("Why:\n")[1].split("\n\nLeft out")[0]
    assert all(len(line) <= 70 or "/" in line for line in why.splitlines())
    # The model's path makes the second column wide, so that reasons go beneath.
    assert "\n  --jinja\n      applies the model's own chat template, tool calls included\n" in why


def test_plan_that_run_refuses_is_shown_with_one_that_fits(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    asked = (str(tiny_model), "--runtime", fake_server(), "--parallel", "4", "--ctx-size", "500000000")
    longer = ("--", "--override-kv", "llama.context_length=int:500000000")
    shown = run_to_end("plan", *asked, *longer)
    assert shown.returncode == 0, shown.stderr
    verdict = shown.stdout.split("\n\n")[-1]
    assert re.match(
        r"run refuses this plan with exit code 71:\n  → Fits: --parallel 1 --ctx-size \d+", verdict
    )
    assert json.loads(run_to_end("plan", *asked, "--json", *longer).stdout)["remedy"].startswith(
        "Fits: --parallel 1"
    )
    refused = run_to_end("run", *asked, "--port", "0", *longer)
    assert refused.returncode == 71
    assert "→ Fits: --parallel 1" in refused.stderr


def test_plan_that_is_started_without_check_is_not_shown_as_refused(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    asked = (str(tiny_model), "--runtime", fake_server(), "--no-memory-check", "--", "-c", "2000000000")
    assert "does NOT fit" in run_to_end("plan", *asked).stdout
    assert "refuses" not in run_to_end("plan", *asked).stdout
