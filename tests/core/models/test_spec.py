"""The spec of a model, and its changes that need another process."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.settings.model import ModelSettings, Settings

SPEC = ModelSpec("tiny", "/models/tiny.gguf")


@pytest.mark.parametrize(
    ("source", "remote"),
    [
        ("/models/tiny.gguf", False),
        ("org/repo:Q4_K_M", True),
        ("https://example.org/a.gguf", True),
        ("", False),
    ],
)
def test_source_that_is_no_path_is_a_download(source: str, remote: bool) -> None:
    assert ModelSpec("tiny", source).is_remote is remote


def test_names_and_stay_do_not_change_started_as() -> None:
    for same in (
        replace(SPEC, aliases=("small",)),
        replace(SPEC, stay=Stay(ttl_s=60.0, pin=True)),
        replace(SPEC, options=ModelSettings(max_queued=3)),
    ):
        assert same.started_as == SPEC.started_as


def test_another_file_or_setting_needs_another_process() -> None:
    for other in (
        replace(SPEC, identity=(("/models/tiny.gguf", 7, 8),)),
        replace(SPEC, settings=Settings(ctx_size=512)),
        replace(SPEC, replicas=2),
        replace(SPEC, options=ModelSettings(devices=("CUDA0",))),
    ):
        assert other.started_as != SPEC.started_as


def test_over_fills_unset_options() -> None:
    own, base = ModelSettings(ctx_size=512, pin=False), ModelSettings(ctx_size=4096, pin=True, parallel=2)
    assert own.over(base) == ModelSettings(ctx_size=512, pin=False, parallel=2)


def test_redacted_shows_names_without_folders() -> None:
    redacted = SPEC.redacted("/models/tiny.gguf: is cut off. There is no other in /models.")
    assert redacted == "tiny.gguf: is cut off. There is no other in its folder."
    beside = replace(
        SPEC,
        identity=(("/blobs/77ab", 1, 1),),
        options=ModelSettings(mmproj="/far/p.gguf", loras=("/far/l.gguf",), draft_model="/far/d.gguf"),
    )
    for path in ("/blobs/77ab", "/far/p.gguf", "/far/l.gguf", "/far/d.gguf"):
        assert beside.redacted(f"{path}: is cut off") == f"{path.rpartition('/')[2]}: is cut off"


def test_problem_with_other_paths_is_replaced_for_clients() -> None:
    for problem in (
        "/models/tiny.gguf: leads to /srv/secret place/none.gguf, which is not there",
        "the folder /srv/secret cannot be read",
    ):
        for spec in (SPEC, ModelSpec("tiny", ""), ModelSpec("tiny", "org/repo:Q8_0")):
            assert spec.redacted(problem) == ""
            assert (
                spec.public_problem(problem) == "The model 'tiny' cannot be loaded: llamasup's log says why"
            )
    assert SPEC.public_problem("/models/tiny.gguf: truncated") == "tiny.gguf: truncated"
