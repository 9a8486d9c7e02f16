"""Facts that are gathered before a start: names, paths, files next to the model, and errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.models.registry import build
from llamasup.core.models.search import search_models
from llamasup.core.planning import facts
from llamasup.core.planning.facts import (
    DEMO_CRC32,
    Launch,
    demo_draft,
    demo_model,
    prepare,
    sibling_projector,
)
from llamasup.core.planning.planner import Planner
from llamasup.core.planning.projectors import Pairing
from llamasup.core.pool.estimate import prepare_listed
from llamasup.core.settings.model import Settings
from llamasup.errors import FolderUnusable, ModelInvalid, ModelMissing, UsageInvalid
from scripts.demo.stories import ANIMALS, conversations
from tests.kit import models, vision
from tests.kit.models import big_endian_decoder, tiny_encoder
from tests.kit.paths import FIXTURES
from tests.kit.vision import vision_projector

HELP = FIXTURES / "help" / "b11434.txt"
ANSWERS = f"""#!/bin/sh
case "$1" in
--help) /bin/cat '{HELP}' ;;
--version) echo 'version: 10114 (ed7adbfef)' >&2 ;;
--list-devices) echo 'Available devices:' ;;
esac
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A runtime that only answers questions."""
    path = tmp_path / "build" / "llama-server"
    path.parent.mkdir()
    path.write_text(ANSWERS)
    path.chmod(0o755)
    return path


def launch(
    model: str | Path, runtime: Path, *, environ: Mapping[str, str] | None = None, **settings: Any
) -> Launch:
    return prepare(str(model), Settings(**settings), runtime=str(runtime), environ=environ or {})


def test_a_linked_llama_server_is_run_with_the_libraries_that_it_was_asked_with(
    server: Path, tiny_model: Path, tmp_path: Path
) -> None:
    link = tmp_path / "llama-server"
    link.symlink_to(server)
    made = Planner(launch(tiny_model, link), tmp_path).plan(1)
    assert made.argv[0] == str(link)
    assert made.env["LD_LIBRARY_PATH"] == str(server.parent)


def test_llama_server_gets_the_model_name_of_llamasup(server: Path, tiny_model: Path, tmp_path: Path) -> None:
    for alias, name, aliases in ((None, "tiny", ()), ("gpt , small", "gpt", ("small",))):
        found = launch(tiny_model, server, alias=alias)
        argv = Planner(found, tmp_path).plan(1).argv
        assert (found.model_id, found.aliases) == (name, aliases)
        assert argv[argv.index("--alias") + 1] == name


def test_an_empty_alias_is_refused_before_the_start(server: Path, tiny_model: Path) -> None:
    with pytest.raises(UsageInvalid, match="empty name"):
        launch(tiny_model, server, alias="")


def test_a_model_of_the_other_byte_order_is_refused_before_the_start(
    server: Path, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(big_endian_decoder())
    with pytest.raises(ModelInvalid, match="big-endian"):
        launch(path, server)
    for option in ("draft_model", "mmproj"):
        given: dict[str, Any] = {option: str(path)}
        with pytest.raises(ModelInvalid, match=f"--{option.replace('_', '-')}: .*big-endian"):
            launch(tiny_model, server, **given)


# --- paths ---------------------------------------------------------------------------------------


def test_relative_path_in_users_arguments_is_resolved_in_the_current_folder(
    server: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = launch(tiny_model, server, extra=("--lora-scaled", "a.gguf:0.5", "--temp", "1"))
    argv = Planner(found, tmp_path).plan(1).argv
    assert argv[-4:] == ("--lora-scaled", f"{tmp_path}/a.gguf:0.5", "--temp", "1")


@pytest.mark.parametrize("option", ["draft_model", "mmproj"])
@pytest.mark.parametrize("path", ["nope.gguf", "~nobody-of-this-name/x.gguf"])
def test_missing_attachment_is_reported_with_its_option(
    server: Path, tiny_model: Path, option: str, path: str
) -> None:
    with pytest.raises(ModelMissing) as refused:
        launch(tiny_model, server, environ={}, **{option: path})
    assert refused.value.message.startswith(f"--{option.replace('_', '-')}: ")
    assert path in refused.value.message


def test_model_as_its_own_projector_is_refused(server: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageInvalid, match="not a projector"):
        Planner(launch(tiny_model, server, mmproj=str(tiny_model)), tmp_path).check()


@pytest.mark.parametrize("flag", ["--spec-draft-model", "--mmproj"])
def test_a_file_given_after_the_dashes_is_looked_into_like_one_given_before_them(
    server: Path, tiny_model: Path, tmp_path: Path, flag: str
) -> None:
    with pytest.raises(ModelMissing) as refused:
        launch(tiny_model, server, extra=(flag, str(tmp_path / "nope.gguf")))
    assert refused.value.message.startswith(f"{flag}: ")
    found = launch(tiny_model, server, extra=("-md", str(tiny_model)))
    assert found.draft == found.model


def test_projector_in_the_folder_is_found_unless_the_user_chooses(
    server: Path, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model" / "tiny.gguf"
    model.parent.mkdir()
    model.write_bytes(tiny_model.read_bytes())
    beside = model.with_name("mmproj-F16.gguf")
    beside.write_bytes(vision_projector())

    found = launch(model, server).found
    assert found is not None
    assert found.projector is not None
    assert found.projector.path == str(beside)
    asked = launch(model, server, mmproj=str(beside))
    assert (asked.found, asked.mmproj) == (None, found.projector.facts)
    assert launch(model, server, mmproj="none").found is None
    assert launch(model, server, extra=("--no-mmproj",)).found is None
    assert launch(model, server, extra=("--mmproj", str(beside))).found is None
    assert launch(tiny_model, server).found is None
    encoder = model.with_name("encoder.gguf")
    encoder.write_bytes(tiny_encoder())
    assert launch(encoder, server).found is None


def test_of_a_folder_that_is_served_no_projector_is_taken_that_leads_out_of_it(
    server: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """X10: beside a model that is given by itself it would be (test above)."""
    outside = tmp_path / "outside" / "p.gguf"
    folder = tmp_path / "models"
    for each in (outside.parent, folder):
        each.mkdir()
    outside.write_bytes(vision_projector())
    (folder / "tiny.gguf").write_bytes(tiny_model.read_bytes())
    (folder / "mmproj-tiny.gguf").symlink_to(outside)

    def listed(*folders: Path) -> Launch:
        spec = build((), search_models(folders).found).specs["tiny"]
        return prepare_listed(spec, runtime=str(server), environ={})

    refused = listed(folder)
    assert (refused.found, refused.sees) == (None, False)
    assert launch(folder / "tiny.gguf", server).sees
    assert listed(folder, outside.parent).sees


def test_a_file_called_demo_is_served_and_a_folder_called_demo_is_not(
    server: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert launch("demo", server).model_path.name == "demo.gguf"
    (tmp_path / "demo").rmdir()
    (tmp_path / "demo").write_bytes(tiny_model.read_bytes())
    assert launch("demo", server).model_path == tmp_path / "demo"


def test_checksum_is_that_of_the_demo_model() -> None:
    """scripts/demo/train.py prints it."""
    assert crc32(demo_model()) == DEMO_CRC32


def test_the_demo_model_of_another_version_is_replaced(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "llamasup").mkdir()
    (tmp_path / "llamasup" / "demo.gguf").write_bytes(demo_model().replace(b"add_space", b"add_spice"))
    path = launch("demo", server).model_path
    assert path.read_bytes() == demo_model()
    written = path.stat()
    assert launch("demo", server).model_path.stat() == written, "written again"


def test_a_demo_model_that_cannot_be_written_is_a_sentence(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "llamasup").mkdir(mode=0o700)
    (tmp_path / "llamasup" / "demo.gguf").mkdir()
    with pytest.raises(FolderUnusable, match="the demo model cannot be written: Is a directory"):
        launch("demo", server)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("~nobody-of-this-name/x.gguf", "there is no user 'nobody-of-this-name'"),
        ("x" * 300, "File name too long"),
        ("nul\0.gguf", "is not a path"),
        ("closed/x", "may not be read (Permission denied)"),
        ("org/name", "neither a file here nor downloaded"),
        ("https://x/y.gguf", "neither a file here nor downloaded"),
    ],
)
def test_a_path_that_leads_nowhere_is_a_sentence(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "closed").mkdir(mode=0o000)
    if name == "closed/x" and os.geteuid() == 0:
        pytest.skip("root may enter every folder")
    with pytest.raises(ModelMissing) as refused:
        launch(name, server)
    assert says in refused.value.message
    assert refused.value.remedy


def test_a_current_folder_that_is_gone_is_a_sentence(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ModelMissing, match="current folder no longer exists"):
        launch("x.gguf", server)


# --- files next to the model ---------------------------------------------------------------------


def pairing_of(model: Path) -> Pairing | None:
    return sibling_projector(model, facts_of(models.tiny_decoder()))


def test_a_projector_is_found_by_its_name_among_other_models(tmp_path: Path) -> None:
    for name in ("mmproj-F16.gguf", "tiny.MMPROJ-Q8_0.GGUF"):
        (tmp_path / name).write_bytes(vision.vision_projector())
    for name in ("tiny.gguf", "other.gguf", "notes.txt", "mmproj.txt"):
        (tmp_path / name).write_bytes(models.tiny_decoder())
    found = pairing_of(tmp_path / "tiny.gguf")
    assert found is not None
    assert found.projector is not None
    assert Path(found.projector.path).name == "tiny.MMPROJ-Q8_0.GGUF"
    unnamed = pairing_of(tmp_path / "third.gguf")
    assert unnamed is not None
    names = "mmproj-F16.gguf and tiny.MMPROJ-Q8_0.GGUF"
    assert unnamed.reason.startswith(f"{names} may belong to this model or to other.gguf: ")


def test_unreadable_files_and_other_models_are_not_projectors(tmp_path: Path) -> None:
    (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "mmproj-gone.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mmproj-folder.gguf").mkdir()
    (tmp_path / "mmproj-not.gguf").write_bytes(models.tiny_decoder())
    assert pairing_of(tmp_path / "tiny.gguf") is None


def test_a_folder_that_cannot_be_listed_has_nothing(tmp_path: Path) -> None:
    assert pairing_of(tmp_path / "gone" / "tiny.gguf") is None


def test_of_very_many_only_the_first_are_looked_into(tmp_path: Path) -> None:
    content = vision.vision_projector()
    for index in range(facts._MAX_PROJECTORS + 5):
        (tmp_path / f"mmproj-{index:03}.gguf").write_bytes(content)
    found = pairing_of(tmp_path / "tiny.gguf")
    assert found is not None
    assert len(found.undecided) == facts._MAX_PROJECTORS


# --- the demo model -------------------------------------------------------------------------------


def facts_of(content: bytes) -> ModelFacts:
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert facts.expected_bytes == len(content)
    return facts


def test_both_are_small_chat_models_with_one_vocabulary() -> None:
    model, draft = facts_of(demo_model()), facts_of(demo_draft())
    assert model.file_bytes < 3_200_000
    assert draft.file_bytes < model.file_bytes / 10
    assert model.vocabulary == draft.vocabulary
    for found in (model, draft):
        assert found.model_class is ModelClass.DECODER
        assert found.chat_template.present
        assert found.quantized_kv_fits


def test_text_of_the_training_is_the_same_each_time() -> None:
    first, second = (list(islice(conversations(1), 200)) for _ in range(2))
    assert first == second
    assert first != list(islice(conversations(2), 200))


def test_answers_follow_the_question() -> None:
    asked = [
        turn for turns in islice(conversations(1), 500) for turn in turns if " about a " in turn.question
    ]
    assert len(asked) > 100
    for turn in asked:
        (animal,) = (name for name in ANIMALS if name in turn.question.lower())
        assert f" {animal}" in turn.answer.split(".")[0]
