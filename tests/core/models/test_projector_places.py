"""The places of a model's projector: `run` and `serve` find the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.gguf.files import read_model
from llamasup.core.models.found import Attachments
from llamasup.core.models.search import search_models
from llamasup.core.planning.facts import sibling_projector
from tests.kit import models, vision

MODEL, PROJECTOR = models.tiny_decoder(), vision.vision_projector()
OLD, NEW = "1" * 40, "2" * 40
HUB = "models--org--repo/snapshots"


@pytest.mark.parametrize(
    ("model", "others", "projector", "why"),
    [
        # mikjee/warpdrv#7, gpustack/gpustack#5108: at the top of the repository
        (
            "org/repo/UD-Q4_K_XL/x-UD-Q4_K_XL.gguf",
            ["org/repo/mmproj-F16.gguf"],
            "org/repo/mmproj-F16.gguf",
            "above",
        ),
        ("repo/MXFP4_MOE/x-00001.gguf", ["repo/mmproj-BF16.gguf"], "repo/mmproj-BF16.gguf", "above"),
        (
            "repo/Q8_0/x-Q8_0.gguf",
            ["repo/Q4_K_M/x-Q4_K_M.gguf", "repo/x-F16.gguf", "repo/mmproj-F16.gguf"],
            "repo/mmproj-F16.gguf",
            "above the model's folder (the only model",
        ),
        # unslothai/unsloth#7460: three of one projector
        (
            "repo/Q8_0/x-Q8_0.gguf",
            ["repo/mmproj-F32.gguf", "repo/mmproj-BF16.gguf", "repo/mmproj-F16.gguf"],
            "repo/mmproj-BF16.gguf",
            "above",
        ),
        # The one in the model's own folder comes first.
        (
            "repo/Q8_0/x-Q8_0.gguf",
            ["repo/Q8_0/mmproj-x-F16.gguf", "repo/mmproj-F16.gguf"],
            "repo/Q8_0/mmproj-x-F16.gguf",
            "in the model's folder",
        ),
        (
            "repo/Q8_0/x-Q8_0.gguf",
            ["repo/Q4_0/other-Q4_0.gguf", "repo/mmproj-F16.gguf"],
            None,
            "mmproj-F16.gguf may belong to this model or to other-Q4_0.gguf",
        ),
        (
            "repo/Q8_0/x-Q8_0.gguf",
            ["repo/other.gguf", "repo/mmproj-F16.gguf"],
            None,
            "may belong to this model or to other.gguf",
        ),
        # lmstudio-ai/lmstudio-bug-tracker#1623: above another kind of folder, it may be anybody's
        ("models/x/x.gguf", ["models/mmproj-F16.gguf"], None, None),
        ("models/x-Q8_0-GGUF/x-Q8_0.gguf", ["models/mmproj-F16.gguf"], None, None),
        # The hub's cache
        (
            f"{HUB}/{NEW}/x-Q8_0.gguf",
            [f"{HUB}/{OLD}/mmproj-F16.gguf"],
            f"{HUB}/{OLD}/mmproj-F16.gguf",
            "in the model's folder",
        ),
        (
            f"{HUB}/{OLD}/Q8_0/x-Q8_0.gguf",
            [f"{HUB}/{NEW}/mmproj-F16.gguf"],
            f"{HUB}/{NEW}/mmproj-F16.gguf",
            "above",
        ),
        (f"{HUB}/{NEW}/x-Q8_0.gguf", [f"models--org--other/snapshots/{OLD}/mmproj-F16.gguf"], None, None),
    ],
)
def test_a_projector_is_found_where_repositories_have_it(
    model: str, others: list[str], projector: str | None, why: str | None, tmp_path: Path
) -> None:
    for name in (model, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PROJECTOR if "mmproj" in name else MODEL)
    path = tmp_path / model
    of_run = sibling_projector(path, read_model(path))
    of_serve = Attachments.among(search_models([tmp_path]).found).pairings.get(str(path))
    for found in (of_run, of_serve):
        if why is None:
            assert found is None
        else:
            assert found is not None
            assert why in found.reason
            expected = None if projector is None else str(tmp_path / projector)
            assert (found.projector and found.projector.path) == expected
