"""``llamasup list`` for users and programs: a real process on real folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.driver import run_to_end
from tests.kit import models
from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf

DECODER = models.tiny_decoder()


def listed(
    *arguments: str | Path, code: int = 0, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    done = run_to_end("list", *map(str, arguments), env=os.environ | dict(environ))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done


def as_json(*arguments: str | Path, environ: Mapping[str, str] = os.environ) -> Any:
    return json.loads(listed(*arguments, "--json", environ=environ).stdout)


def put(path: Path, content: bytes = DECODER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_models_are_listed_by_the_names_for_requests(tmp_path: Path) -> None:
    put(tmp_path / "a b.gguf")
    put(tmp_path / "org/repo/x-Q4_K_M.gguf", models.tiny_encoder())
    put(tmp_path / "lora.gguf", models.tiny_lora())
    parts = models.write_split_decoder(tmp_path, "big")
    done = listed(tmp_path)
    assert done.stderr == ""
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["NAME", "CLASS", "SIZE", "QUANT", "CONTEXT", "WHERE"]
    assert [row.split()[:2] for row in rows] == [
        ["a-b", "decoder"],
        ["big", "decoder"],
        ["x-Q4_K_M", "encoder"],
    ]
    assert len({row.index("/") for row in rows[:2]}) == 1  # columns
    models_json = {model["id"]: model for model in as_json(tmp_path)["models"]}
    assert models_json["x-Q4_K_M"]["aliases"] == ["org/repo:Q4_K_M"]
    assert models_json["big"]["files"] == len(parts)
    assert models_json["big"]["file_bytes"] == sum(part.stat().st_size for part in parts)
    assert models_json["a-b"]["class"] == "decoder"
    assert models_json["a-b"]["output_modalities"] == ["text"]
    assert models_json["x-Q4_K_M"]["output_modalities"] == ["embeddings"]
    assert models_json["a-b"]["path"] == str(tmp_path / "a b.gguf")


def test_broken_models_get_a_row_and_unserved_files_a_line_on_stderr(tmp_path: Path) -> None:
    put(tmp_path / "cut.gguf", models.truncated_decoder(0.25))
    put(tmp_path / "same.gguf")
    put(tmp_path / "two/same.gguf", models.tiny_encoder())
    assert "cut" not in listed(tmp_path).stdout + listed(tmp_path).stderr
    done = listed(tmp_path, "--all")
    row, other = done.stdout.splitlines()[1:]
    assert row.split()[:2] == ["cut", "broken"]
    assert other.split()[:2] == ["two/same", "encoder"]
    assert "truncated: 169040 of 676160 bytes" in row
    assert f"2 files have the name 'same', so {tmp_path / 'same.gguf'} is not served" in " ".join(
        done.stderr.split()
    )
    models_json = as_json(tmp_path, "--all")
    assert {problem["cause"] for problem in models_json["problems"]} == {"same_id", "model_invalid"}
    assert models_json["models"][0]["problem"].endswith("truncated: 169040 of 676160 bytes, 25.0 %")


def test_files_that_are_no_models_are_listed_with_all(tmp_path: Path) -> None:
    put(tmp_path / "x.gguf")
    put(tmp_path / "lora.gguf", models.tiny_lora())
    keys: dict[str, KeyValue] = {"general.architecture": "qwen_image", "general.file_type": 7}
    put(tmp_path / "qwen-image-Q8_0.gguf", write_gguf(keys, [(TensorPlan("a", (64,)), bytes(256))]))
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "blobs" / "gone")
    assert [row.split()[0] for row in listed(tmp_path).stdout.splitlines()[1:]] == ["x"]
    rows = [row.split()[:2] for row in listed(tmp_path, "--all").stdout.splitlines()[1:]]
    assert rows == [["gone", "broken"], ["x", "decoder"], ["lora", "lora"], ["qwen-image-Q8_0", "other"]]
    assert "qwen-image-Q8_0.gguf: an image or video model" in listed(tmp_path, "--all").stdout
    assert [model["id"] for model in as_json(tmp_path)["models"]] == ["x"]
    *_, image = as_json(tmp_path, "--all")["models"]
    assert (image["class"], image["contents"]) == ("other", "an image or video model (qwen_image)")


def test_attachments_are_shown_with_their_model(tmp_path: Path) -> None:
    put(tmp_path / "x.gguf")
    put(tmp_path / "mmproj-x.gguf", models.tiny_projector())
    put(tmp_path / "lora.gguf", models.tiny_lora())
    assert "x.gguf, with mmproj-x.gguf, adapters: lora.gguf" in listed(tmp_path).stdout
    (model,) = as_json(tmp_path)["models"]
    assert model["projector"] == str(tmp_path / "mmproj-x.gguf")
    assert model["adapters"] == [str(tmp_path / "lora.gguf")]


def test_caches_and_own_folder_are_searched_by_default(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--repo/snapshots" / ("a" * 40)
    put(snapshot / "x-Q8_0.gguf")
    put(tmp_path / "llama/org2_repo_y-Q4_0.gguf")
    put(tmp_path / "llama/manifest=org2=repo=latest.json", b"{}")
    put(tmp_path / "data/llamasup/models/own.gguf")
    places = {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "LLAMA_CACHE": str(tmp_path / "llama"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    assert {model["id"] for model in as_json(environ=places)["models"]} == {
        "org/repo:Q8_0",
        "org2/repo:Q4_0",
        "own",
    }


def test_empty_folder_is_an_empty_list_with_a_message(tmp_path: Path) -> None:
    done = listed(tmp_path)
    assert done.stdout == ""
    assert f"no models in {tmp_path}" in done.stderr
    assert as_json(tmp_path)["models"] == []


def test_invalid_folder_is_refused_and_the_others_are_shown(tmp_path: Path) -> None:
    put(tmp_path / "m/x.gguf")
    done = listed(tmp_path / "gone", tmp_path / "m/x.gguf", tmp_path / "m", code=66)
    assert done.stdout.splitlines()[1].startswith("x ")
    assert f"{tmp_path / 'gone'}: there is no such folder" in done.stderr
    assert f"llamasup inspect {tmp_path / 'm/x.gguf'}" in done.stderr


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    put(tmp_path / "a\x1b[31m\nb.gguf")
    done = listed(tmp_path)
    assert r"a\x1b[31m\nb.gguf" in done.stdout
    assert len(done.stdout.splitlines()) == 2


def test_name_outside_utf8_is_listed(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/x\xff.gguf"
    with open(path, "wb") as file:  # noqa: PTH123 - bytes
        file.write(DECODER)
    assert r"x\xff.gguf" in listed(tmp_path).stdout
    (model,) = as_json(tmp_path)["models"]
    assert model["path"].endswith(r"x\xff.gguf")


def test_thousand_models_are_listed(tmp_path: Path) -> None:
    top = tmp_path / "models"
    first = put(top / "m-0000.gguf")
    for number in range(1, 1000):
        shutil.copy(first, top / f"m-{number:04}.gguf")
    assert len(as_json(top)["models"]) == 1000
    assert len(listed(top).stdout.splitlines()) == 1001


def test_decision_models_are_listed_as_such_even_of_unknown_types(tmp_path: Path) -> None:
    for kind in ("lev", "kev", "future-d9"):
        put(tmp_path / f"{kind}.gguf", models.tiny_decider(kind))
    found = {model["id"]: model for model in as_json(tmp_path)["models"]}
    assert {(model["class"], *model["output_modalities"]) for model in found.values()} == {
        ("decision", "decisions")
    }
    assert found.keys() == {"lev", "kev", "future-d9"}
