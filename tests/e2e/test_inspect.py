"""``llamasup inspect`` for users and programs: a real process on real files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driver import PATIENCE_S, command, on_terminal, run_to_end
from tests.kit import models
from tests.kit.architectures import tiny_model

CONTRACT = {
    *("path", "file_bytes", "expected_bytes", "architecture", "class", "name", "parameters", "quantization"),
    *("layers", "context_length", "embedding_length", "head_count", "head_count_kv", "vocab_size"),
    "chat_template",
}
KINDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "decoder": (models.tiny_decoder, "decoder"),
    "big-endian": (models.big_endian_decoder, "decoder"),
    "encoder": (models.tiny_encoder, "encoder"),
    "reranker": (models.tiny_reranker, "reranker"),
    "projector": (models.tiny_projector, "projector"),
    "lora": (models.tiny_lora, "lora"),
    "vocab": (models.vocabulary_only, "vocab"),
}


def inspected(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_to_end("inspect", *map(str, arguments))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    if code:
        assert done.stdout == ""
        assert "→" in done.stderr
    else:
        assert done.stderr == ""
    return done


def as_json(*arguments: str | Path) -> Any:
    return json.loads(inspected(*arguments, "--json").stdout)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# --- one model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_json_of_every_kind_of_file_has_all_documented_fields(kind: str, tmp_path: Path) -> None:
    make, model_class = KINDS[kind]
    path = put(tmp_path / "m.gguf", make())
    shown = as_json(path)
    assert shown.keys() >= CONTRACT
    assert shown["path"] == str(path)
    assert shown["class"] == model_class
    assert shown["file_bytes"] == path.stat().st_size
    assert 0 <= shown["file_bytes"] - shown["expected_bytes"] < 32  # the last tensor's padding
    assert shown["chat_template"].keys() >= {"present", "tools", "system"}
    assert shown["big_endian"] is (kind == "big-endian")
    assert (shown["fits_here"] is None) is (model_class in ("projector", "lora", "vocab"))


def test_split_model_is_shown_as_one_model(tmp_path: Path) -> None:
    parts = models.write_split_decoder(tmp_path)
    shown = as_json(parts[0])
    assert shown["files"] == 3
    assert shown["file_bytes"] == sum(part.stat().st_size for part in parts)
    assert "and 2 more parts" in inspected(parts[0]).stdout


def test_text_shows_class_memory_and_fit() -> None:
    text = inspected("demo").stdout
    for words in (
        "decoder: chat and text completion",
        "context        1,024 tokens",
        "attention      6 heads of 32",
        "system messages",
        "weights        2.9 MiB: 2.7 MiB in layers",
        "for each 1,000 tokens 4.4 MiB in f16, 2.3 MiB in q8_0",
        "fits here      yes: ",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("gpt-oss", ["window 64 tokens in 2 layers", "experts 2 of 4 for each token"]),
        ("falcon-h1", ["recurrent 2 layers of 2", "attention 2 heads of 32, 1 for keys and values"]),
        ("deepseek2", ["experts 2 of 4 and 1 shared for each token", "for keys and values, latent (MLA)"]),
        ("glm4moe", ["layers 3, width 64, 1 of them for speculative decoding (MTP)", "192 KiB experts"]),
        ("rwkv7", ["state 17 KiB for each request, of any length"]),
    ],
)
def test_text_shows_architecture_specific_facts(name: str, lines: list[str], tmp_path: Path) -> None:
    text = " ".join(inspected(put(tmp_path / "m.gguf", tiny_model(name))).stdout.split())
    for line in lines:
        assert line in text


def test_lora_text_shows_how_to_use_it(tmp_path: Path) -> None:
    text = inspected(put(tmp_path / "l.gguf", models.tiny_lora())).stdout
    assert "changes the model that it was trained on: -- --lora FILE" in text
    assert "fits here" not in text


def test_control_characters_in_file_content_are_escaped(tmp_path: Path) -> None:
    evil = b"\x1b]0;owned"  # of the same length, so that the header stays valid
    content = models.tiny_decoder().replace(b"llamasup demo", evil.ljust(13))
    path = put(tmp_path / "\x1b[31mred\n.gguf", content)
    text = inspected(path).stdout
    assert "\\x1b]0;owned" in text
    assert "\\x1b[31mred\\n.gguf" in text
    assert "\\x1b[31mred\\n.gguf" in inspected(tmp_path).stdout
    assert as_json(path)["name"] == evil.decode().ljust(13)


def test_control_characters_in_errors_are_escaped(tmp_path: Path) -> None:
    stderr = inspected(put(tmp_path / "\x1b[31mred.gguf", b""), code=65).stderr
    assert "\\x1b[31mred.gguf: the file is empty" in stderr


# --- files that cannot be used -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda path: None, 66, "there is no such file"),
        (lambda path: path.touch(), 65, "the file is empty"),
        (lambda path: path.write_bytes(models.truncated_decoder(0.25)), 65, "truncated: 169040 of 676160"),
        (os.mkfifo, 65, "is a named pipe"),
        (lambda path: path.symlink_to("/dev/zero"), 65, "is a character device"),
        (lambda path: path.symlink_to(path), 66, "form a circle"),
        (lambda path: path.mkdir(), 66, "no .gguf file in this folder"),
    ],
    ids=["missing", "empty", "truncated", "fifo", "zero", "loop", "folder"],
)
def test_unusable_file_is_reported_with_reason_and_exit_code(
    make: Callable[[Path], object], code: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    assert words in inspected(path, code=code).stderr


def test_error_for_an_incomplete_split_model_names_the_missing_part(tmp_path: Path) -> None:
    parts = models.write_split_decoder(tmp_path)
    parts[0].unlink()
    assert "part 1 of this model is missing" in inspected(parts[0], code=66).stderr


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_unreadable_file_is_reported(tiny_model: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "secret.gguf", tiny_model.read_bytes())
    path.chmod(0)
    # Root reads everything, except without these two capabilities.
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = run_to_end("inspect", str(path), prefix=plain)
    assert done.returncode == 66
    assert "may not be read (Permission denied)" in done.stderr


# --- folders -------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Good and broken files, a set, subfolders, and links in a circle."""
    top = tmp_path / "models"
    put(top / "good.gguf", models.tiny_decoder())
    put(top / "org/repo/encoder.gguf", models.tiny_encoder())
    put(top / "lora.gguf", models.tiny_lora())
    put(top / "cut.gguf", models.truncated_decoder())
    put(top / os.fsdecode(b"caf\xe9.gguf"), models.tiny_decoder())
    models.write_split_decoder(top, "set", 2)
    (top / "org/up").symlink_to("..")
    (top / "loop.gguf").symlink_to("loop.gguf")
    return top


def test_folder_listing_marks_broken_files(mixed: Path) -> None:
    rows = [line.split() for line in inspected(mixed).stdout.splitlines()]
    assert rows[0] == ["NAME", "CLASS", "ARCHITECTURE", "SIZE", "QUANT", "CONTEXT", "FITS", "HERE"]
    assert {row[0]: row[1] for row in rows[1:]} == {
        "caf\\xe9.gguf": "decoder",
        "cut.gguf": "broken",
        "good.gguf": "decoder",
        "loop.gguf": "broken",
        "lora.gguf": "lora",
        "org/repo/encoder.gguf": "encoder",
        "set-00001-of-00002.gguf": "decoder",
    }
    text = inspected(mixed).stdout
    assert "truncated: 338080 of 676160 bytes" in text
    assert re.findall(r"\d+ KiB in \d+ files", text) == ["661 KiB in 2 files"]


def test_folder_json_contains_every_model_and_every_error(mixed: Path) -> None:
    shown = as_json(mixed)["models"]
    assert len(shown) == 7
    broken = {Path(model["path"]).name: model["error"] for model in shown if "error" in model}
    assert broken.keys() == {"cut.gguf", "loop.gguf"}
    assert broken["cut.gguf"]["cause"] == "model_invalid"
    assert all(error["message"] and error["remedy"] for error in broken.values())
    assert all(model.keys() >= CONTRACT for model in shown if "error" not in model)


def test_projector_in_the_folder_of_a_model_is_shown_with_it(tmp_path: Path) -> None:
    model = put(tmp_path / "eyes.gguf", models.tiny_decoder())
    projector = put(tmp_path / "mmproj-F16.gguf", models.tiny_projector())
    assert as_json(model)["projector"] == str(projector)
    shown = {one_model["path"]: one_model["projector"] for one_model in as_json(tmp_path)["models"]}
    assert shown == {str(model): str(projector), str(projector): None}
    assert ", with mmproj-F16.gguf" in inspected(tmp_path).stdout
    assert "mmproj-F16.gguf, in the same folder" in inspected(model).stdout
    put(tmp_path / "cut.gguf", b"GGUF")
    assert ", with mmproj-F16.gguf" not in inspected(tmp_path).stdout
    assert "may belong to this model or to cut.gguf: choose one with --mmproj" in inspected(model).stdout


def test_inspect_works_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without a home, or a container whose root is read-only."""
    model = put(tmp_path / "models" / "m.gguf", models.tiny_decoder())
    monkeypatch.setenv("XDG_CACHE_HOME", str(put(tmp_path / "file", b"")))
    assert as_json(model)["class"] == "decoder"
    assert len(as_json(model.parent)["models"]) == 1


@pytest.mark.skipif(sys.byteorder == "big", reason="the other way round")
def test_model_with_the_other_byte_order_does_not_fit(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", models.big_endian_decoder())
    assert as_json(path)["fits_here"]["foreign_byte_order"] is True
    for text in (inspected(path).stdout, inspected(tmp_path).stdout):
        assert "no: its byte order differs from the machine's" in text


def test_folder_with_only_broken_files_is_listed(tmp_path: Path) -> None:
    put(tmp_path / "cut.gguf", models.truncated_decoder())
    assert "broken" in inspected(tmp_path).stdout


def test_folder_without_models_is_reported(tmp_path: Path) -> None:
    put(tmp_path / "readme.md", b"")
    assert "no .gguf file in this folder" in inspected(tmp_path, code=66).stderr
    assert as_json(tmp_path) == {"models": [], "notes": []}


def test_folder_with_models_too_deep_is_not_reported_as_empty(tmp_path: Path) -> None:
    put(tmp_path / "1/2/3/4/5/6/7/deep.gguf", models.tiny_decoder())
    assert "(folders more than 6 levels down were skipped)" in inspected(tmp_path, code=66).stderr
    assert as_json(tmp_path)["notes"] == ["folders more than 6 levels down were skipped"]


# --- several at once -----------------------------------------------------------------------------


def test_several_files_are_shown_in_the_given_order(mixed: Path) -> None:
    given = [mixed / "good.gguf", mixed / "lora.gguf", mixed / "org" / "repo"]
    text = inspected(*given).stdout
    places = [text.index(str(path)) for path in given]
    assert places == sorted(places)
    assert "encoder.gguf" in text[places[-1] :]
    assert [Path(model["path"]).name for model in as_json(*given)["models"]] == [
        "good.gguf",
        "lora.gguf",
        "encoder.gguf",
    ]


def test_broken_file_does_not_hide_the_other_files(mixed: Path) -> None:
    given = list(map(str, (mixed / "gone.gguf", mixed / "good.gguf", mixed / "cut.gguf")))
    done = run_to_end("inspect", *given)
    assert done.returncode == 66  # of the first
    assert done.stdout.count("fits here") == 1
    assert "gone.gguf: there is no such file" in done.stderr
    assert "truncated: 338080 of 676160 bytes" in done.stderr

    done = run_to_end("inspect", "--json", *given)
    assert done.returncode == 66
    shown = json.loads(done.stdout)["models"]
    assert [model["path"] for model in shown] == given
    assert [model.get("error", {}).get("cause") for model in shown] == [
        "model_missing",
        None,
        "model_invalid",
    ]


# --- terminals -----------------------------------------------------------------------------------


def test_lines_are_wrapped_between_words_on_a_narrow_terminal(mixed: Path) -> None:
    wide = inspected(mixed, mixed / "good.gguf", mixed / "lora.gguf").stdout
    narrow = on_terminal(command("inspect", *map(str, (mixed, mixed / "good.gguf", mixed / "lora.gguf"))), 60)
    # The free memory of the machine is not twice the same.
    assert re.sub(r"[\d.]+", "N", narrow).split() == re.sub(r"[\d.]+", "N", wide).split()
    assert max(map(len, wide.splitlines())) > 100
    # The first columns of a table are what they are.
    assert max(len(line) for line in narrow.splitlines() if ":" in line) <= 76


# --- readers of the output -----------------------------------------------------------------------


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_reader_that_closes_the_pipe_early_is_no_error(option: tuple[str, ...], tmp_path: Path) -> None:
    """As ``| head -1``: the pipe is closed before the first byte, and the list would not fit into it."""
    for number in range(300):
        put(tmp_path / f"{number:0200}.gguf", b"")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command("inspect", str(tmp_path), *option),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("inspect", "demo"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 71
    assert "Cannot write the result to standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_terminal_without_unicode_gets_escapes(tmp_path: Path) -> None:
    put(tmp_path / "模型.gguf", models.tiny_decoder())
    done = run_to_end("inspect", str(tmp_path), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "\\u6a21\\u578b.gguf" in done.stdout
