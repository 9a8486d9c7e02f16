"""The ids of found files, from their paths."""

from __future__ import annotations

from collections.abc import Container

from llamasup.core.models.found import current_files, ids_of, manifest_repo, parse_hub_path

REVISION = "a" * 40
SNAPSHOT = f"models--org--repo/snapshots/{REVISION}"


def test_id_of_a_file_in_a_models_folder_is_its_name() -> None:
    assert ids_of(["x-Q4_K_M.gguf", "sub/y.gguf"]) == {"x-Q4_K_M.gguf": ("x-Q4_K_M",), "sub/y.gguf": ("y",)}


def test_file_in_repository_folders_has_its_id_too() -> None:
    ids = ids_of(["org/repo/x-Q4_K_M.gguf", "org/repo/UD-Q2_K_XL/x-00001-of-00002.gguf"])
    assert ids == {
        "org/repo/x-Q4_K_M.gguf": ("x-Q4_K_M", "org/repo:Q4_K_M"),
        "org/repo/UD-Q2_K_XL/x-00001-of-00002.gguf": ("x", "org/repo:UD-Q2_K_XL"),
    }


def test_file_of_the_hubs_cache_has_repository_and_quantization() -> None:
    assert ids_of([f"{SNAPSHOT}/x-q8_0.gguf"]) == {f"{SNAPSHOT}/x-q8_0.gguf": ("org/repo:Q8_0",)}
    assert ids_of([f"hub/{SNAPSHOT}/x-q8_0.gguf"]) == {f"hub/{SNAPSHOT}/x-q8_0.gguf": ("org/repo:Q8_0",)}


def test_files_of_one_quantization_have_their_file_names() -> None:
    paths = [f"{SNAPSHOT}/{name}.gguf" for name in ("a-Q8_0", "b-Q8_0", "c-Q4_0", "mmproj-Q4_0", "plain")]
    assert [ids[0] for ids in ids_of(paths).values()] == [
        "org/repo:a-Q8_0.gguf",
        "org/repo:b-Q8_0.gguf",
        "org/repo:Q4_0",
        "org/repo:Q4_0",
        "org/repo:plain.gguf",
    ]


def test_incomplete_copy_changes_no_name() -> None:
    whole, half = "org/repo/x-Q4_K_M.gguf", "org/repo/y-Q4_K_M.gguf"
    ids = ids_of([whole, half], broken={half})
    assert ids[whole] == ("x-Q4_K_M", "org/repo:Q4_K_M")
    assert ids[half] == ("y-Q4_K_M", "org/repo:y-Q4_K_M.gguf")
    assert ids_of([half], broken={half})[half] == ("y-Q4_K_M", "org/repo:Q4_K_M")


def test_file_of_llama_cpps_older_cache_has_its_manifests_id() -> None:
    repositories = ["org/re", "org/re_po", "other/x"]
    ids = ids_of(["org_re_po_x-Q8_0.gguf", "org_re_y-Q4_0.gguf", "stranger.gguf"], repositories)
    assert ids == {
        "org_re_po_x-Q8_0.gguf": ("org/re_po:Q8_0",),
        "org_re_y-Q4_0.gguf": ("org/re:Q4_0",),
        "stranger.gguf": ("stranger",),
    }


def test_manifests_are_recognized_by_their_names() -> None:
    assert manifest_repo("manifest=ggml-org=SmolVLM2-GGUF=latest.json") == "ggml-org/SmolVLM2-GGUF"
    assert manifest_repo("manifest=ggml-org=latest.json") is None
    assert manifest_repo("x.gguf") is None


def test_invalid_repository_name_leaves_the_file_name() -> None:
    assert ids_of(["../x/y-Q8_0.gguf", "ö rg/re po/y-Q8_0.gguf"]) == {
        "../x/y-Q8_0.gguf": ("y-Q8_0",),
        "ö rg/re po/y-Q8_0.gguf": ("y-Q8_0",),
    }
    assert list(ids_of([f"models--ö--x/snapshots/{REVISION}/y.gguf"]).values()) == [("y",)]


def test_file_without_any_allowed_character_has_no_id() -> None:
    assert ids_of(["模型.gguf", "ö/x/模型.gguf"]) == {"模型.gguf": (), "ö/x/模型.gguf": ()}


def test_repository_without_an_organisation_has_a_short_id() -> None:
    place = parse_hub_path(f"models--gpt2/snapshots/{REVISION}/x.gguf")
    assert place is not None
    assert (place.repo, place.folder) == ("gpt2", "models--gpt2")
    assert parse_hub_path("models--org--repo/blobs/x.gguf") is None


def test_file_missing_in_the_current_revision_is_the_newest() -> None:
    def at(revision: str, file: str) -> str:
        return f"models--org--repo/snapshots/{revision}/{file}"

    def kept(*paths: str, broken: Container[str] = ()) -> set[str]:
        return set(current_files(paths, {"models--org--repo": ["main", "newer", "older"]}, broken))

    old, newer = at("older", "x-Q4_K_M.gguf"), at("newer", "x-Q4_K_M.gguf")
    assert kept(old, newer, at("main", "y-Q8_0.gguf")) == {newer, at("main", "y-Q8_0.gguf")}
    assert kept(old, at("main", "x-Q4_K_M.gguf")) == {at("main", "x-Q4_K_M.gguf")}
    # The current revision has the quantization under another name, or in more parts.
    assert kept(old, at("main", "z-Q4_K_M.gguf")) == {at("main", "z-Q4_K_M.gguf")}
    # The current revision is incomplete.
    half = at("main", "x-Q4_K_M-00001-of-00002.gguf")
    assert kept(old, half, broken={half}) == {old}
    assert kept(half, broken={half}) == {half}
    # All files of one revision count, also several of one quantization.
    all_of_it = {
        at("main", name) for name in ("a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf", "c.gguf")
    }
    assert kept(*all_of_it, "elsewhere/x-Q4_K_M.gguf") == {*all_of_it, "elsewhere/x-Q4_K_M.gguf"}
