"""Mistakes with ``llamasup tune``: each a sentence, the right exit code, and nothing is started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.planning.facts import prepare
from llamasup.core.planning.measured.stores import load_results, save_results, tuning_folder
from llamasup.core.planning.measured.tuned import NO_CHANGES, Changes, Conditions, Kept, KeptResults
from llamasup.core.settings.model import Settings
from llamasup.core.system.storage.fact_cache import FileIdentity
from llamasup.errors import FolderUnusable
from llamasup.features.tuning.tune import keep, only_tuning
from tests.e2e.driver import run_to_end
from tests.kit.children import NewChildren
from tests.kit.kept_results import kept_for

MEASURED_ON = Conditions("build", "machine", "asked", "files", "defaults")
KEPT = Kept(
    MEASURED_ON, "latency", None, Changes((("--threads", "1"),)), 1.18, 1.11, 1.24, "2026-11-26", 50, 3.0
)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--for", "speed"), 2, "Use one of latency, throughput, memory"),
        (("--minutes", "0"), 2, "more than 0"),
        (("--minutes", "1e9"), 2, "at most 1440"),
        (("--minutes", "nan"), 2, "out of range"),
        (("--profile", "plain"), 2, "nothing to tune"),
        (("--for", "memory", "--profile", "latency"), 2, "contradicts"),
        (("--show", "--forget"), 2, "exclude each other"),
        (("--access-log", "MISSING"), 2, "No such file"),
        (("--access-log", "/dev/null"), 2, "is not a file"),
        (("--access-log", __file__), 2, "no line has the tokens"),
        (("--picture", "MISSING/picture.svg"), 71, "no writable folder MISSING"),
        (("--threads", "0"), 2, "--threads"),
        (("--", "--no-such-flag"), 2, "--no-such-flag"),
    ],
)
def test_a_mistake_is_named_before_anything_is_started(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    tiny_model: Path,
    fake_server: Callable[..., str],
    tmp_path: Path,
) -> None:
    new_children = NewChildren()
    missing = str(tmp_path / "missing")
    words = [word.replace("MISSING", missing) for word in arguments]
    done = run_to_end("tune", str(tiny_model), "--runtime", fake_server(), *words)
    assert done.returncode == code, done.stderr
    assert says.replace("MISSING", missing) in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert new_children() == []


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    for option in ((), ("--show",), ("--forget",)):
        done = run_to_end("tune", str(tmp_path / "no.gguf"), *option)
        assert done.returncode == 66
        assert "no.gguf" in done.stderr


def test_without_results_show_says_so(tiny_model: Path) -> None:
    done = run_to_end("tune", str(tiny_model), "--show")
    assert done.returncode == 0
    assert "no kept result" in done.stderr
    assert json.loads(run_to_end("tune", str(tiny_model), "--show", "--json").stdout)["results"] == []


def test_results_are_shown_and_forgotten(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    runtime = fake_server()
    launch = prepare(str(tiny_model), Settings(), runtime=runtime, environ=os.environ)
    used = kept_for(launch, Changes((("--threads", "1"),)))
    save_results(FileIdentity.of(tiny_model), KeptResults((KEPT, used)))
    words = ("tune", str(tiny_model), "--show", "--runtime", runtime)
    line = f"latency (profile none): --threads 1: at least 1.11 ×, {KEPT.measured.why}"
    assert run_to_end(*words).stdout.splitlines() == [
        f"{line}; not used now: it was measured with another build of llama-server",
        line,
    ]
    listed = json.loads(run_to_end(*words, "--json").stdout)["results"]
    assert [one["used"] for one in listed] == [False, True]
    assert "another build" in listed[0]["why_not"]
    save_results(FileIdentity.of(tiny_model), KeptResults((KEPT,)))
    without = run_to_end("tune", str(tiny_model), "--show", "--runtime", str(tmp_path / "missing")).stdout
    assert "not used now: " in without
    done = run_to_end("tune", str(tiny_model), "--forget")
    assert "Forgot 1 result of " in done.stderr
    assert load_results(FileIdentity.of(tiny_model)).results == ()


@pytest.fixture
def blocked(tiny_model: Path) -> Path:
    """A folder of results in which those of the tiny model cannot be replaced."""
    save_results(FileIdentity.of(tiny_model), KeptResults((KEPT,)))
    (file,) = tuning_folder().glob("tuned-*")
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    return file.parent


def test_results_that_cannot_be_deleted_are_not_forgotten(tiny_model: Path, blocked: Path) -> None:
    done = run_to_end("tune", str(tiny_model), "--forget")
    assert done.returncode == FolderUnusable.exit_code
    assert f"{blocked}: the results of tuning cannot be saved" in done.stderr
    assert "Forgot" not in done.stderr


def test_a_result_that_cannot_be_saved_is_an_error(tiny_model: Path, blocked: Path) -> None:
    with pytest.raises(FolderUnusable, match="cannot be saved"):
        keep(FileIdentity.of(tiny_model), KEPT, lambda _text: None)


def test_results_of_a_changed_file_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    save_results(FileIdentity.of(path), KeptResults((KEPT,)))
    assert load_results(FileIdentity.of(path)).results == (KEPT,)
    path.write_bytes(b"another")
    assert load_results(FileIdentity.of(path)).results == ()


def test_a_result_with_a_draft_does_not_apply_to_a_changed_draft(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    draft, runtime = tmp_path / "draft.gguf", fake_server()
    draft.write_bytes(tiny_model.read_bytes())
    words = ("plan", str(tiny_model), "--runtime", runtime, "--draft-model", str(draft), "--json")
    of_draft = Settings(draft_model=str(draft))
    launch = prepare(str(tiny_model), of_draft, runtime=runtime, environ=os.environ)
    keep(FileIdentity.of(tiny_model), kept_for(launch, KEPT.changes), lambda _text: None)
    assert json.loads(run_to_end(*words).stdout)["measured"] is not None
    os.utime(draft, ns=(1, 1))  # trained again, at the same path
    assert json.loads(run_to_end(*words).stdout)["measured"] is None


def test_an_unchecked_result_does_not_survive_a_tuning_without_allow_lossy(tiny_model: Path) -> None:
    said: list[str] = []
    identity, nothing = FileIdentity.of(tiny_model), replace(KEPT, changes=NO_CHANGES)
    keep(identity, replace(KEPT, lossy=True), said.append)
    keep(identity, nothing, said.append)
    assert load_results(identity).results[0].changes == KEPT.changes
    keep(identity, replace(KEPT, lossy=True, unchecked=True), said.append, allow_lossy=True)
    keep(identity, nothing, said.append, allow_lossy=True)
    assert load_results(identity).results[0].changes == KEPT.changes
    keep(identity, nothing, said.append)
    assert load_results(identity).results == (nothing,)
    assert "dropped" in said[-1]


def test_a_damaged_result_changes_no_plan(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    save_results(FileIdentity.of(tiny_model), KeptResults((KEPT,)))
    for file in tuning_folder().glob("tuned-*"):
        file.write_bytes(file.read_bytes()[:-9])
    done = run_to_end("plan", str(tiny_model), "--runtime", fake_server(), "--json")
    assert json.loads(done.stdout)["measured"] is None


def test_a_model_that_is_being_tuned_is_not_forgotten(tiny_model: Path) -> None:
    with only_tuning(tiny_model):
        done = run_to_end("tune", str(tiny_model), "--forget")
    assert done.returncode == 75
    assert "is being tuned by another llamasup" in done.stderr
