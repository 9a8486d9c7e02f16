"""The projector that is removed together with a model."""

from __future__ import annotations

from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.models.found import FoundModel, projector_going_with
from llamasup.errors import LlamasupError, ModelInvalid
from tests.core.planning.plans import model

MODEL = model()
PROJECTOR = model(model_class=ModelClass.PROJECTOR, projection_length=MODEL.embedding_length)


def found(path: str, outcome: ModelFacts | LlamasupError | None = None, real: str = "") -> FoundModel:
    if outcome is None:
        outcome = PROJECTOR if "mmproj" in path else MODEL
    return FoundModel(path, outcome, ((real or path, 1, 1),))


def test_own_projector_is_removed_with_the_model() -> None:
    folder = [found("/m/a.gguf"), found("/m/mmproj-a.gguf"), found("/m/mmproj-b.gguf")]
    assert projector_going_with("/m/a.gguf", folder) == "/m/mmproj-a.gguf"


def test_uncertain_projector_is_kept() -> None:
    assert projector_going_with("/m/a.gguf", [found("/m/a.gguf")]) is None
    assert projector_going_with("/m/mmproj-a.gguf", [found("/m/mmproj-a.gguf")]) is None
    folder = [found("/m/a.gguf"), found("/m/b.gguf"), found("/m/mmproj.gguf")]
    assert projector_going_with("/m/a.gguf", folder) is None


def test_projector_paired_with_another_model_is_kept() -> None:
    folder = [found("/m/a-Q8_0.gguf"), found("/m/a-Q4_0.gguf"), found("/m/mmproj-a.gguf")]
    assert projector_going_with("/m/a-Q8_0.gguf", folder) is None
    linked = [found("/n/x.gguf"), found("/n/mmproj.gguf", real="/m/mmproj-a.gguf")]
    assert projector_going_with("/m/a-Q8_0.gguf", [folder[0], folder[2], *linked]) is None


def test_projector_that_may_belong_to_another_is_kept() -> None:
    folder = [found("/m/a.gguf"), found("/m/b.gguf"), found("/m/mmproj-a.gguf")]
    assert projector_going_with("/m/a.gguf", folder) is None
    hard_link = found("/m/b.gguf", real="/m/a.gguf")
    assert projector_going_with("/m/a.gguf", [folder[0], hard_link, folder[2]]) is None
    linked = [found("/n/x.gguf"), found("/n/y.gguf"), found("/n/mmproj-z.gguf", real="/m/mmproj-a.gguf")]
    assert projector_going_with("/m/a.gguf", [folder[0], folder[2], *linked]) is None


def test_projector_is_removed_if_no_other_model_can_use_it() -> None:
    names = ("/m/a.gguf", "/m/b.gguf", "/m/mmproj-a.gguf", "/m/mmproj-b.gguf")
    assert projector_going_with("/m/a.gguf", [found(name) for name in names]) == "/m/mmproj-a.gguf"
    wide = replace(MODEL, embedding_length=2 * MODEL.embedding_length)
    folder = [found("/m/a.gguf"), found("/m/b.gguf", wide), found("/m/mmproj-a.gguf")]
    assert projector_going_with("/m/a.gguf", folder) == "/m/mmproj-a.gguf"


def test_projector_next_to_an_unreadable_file_is_kept() -> None:
    folder = [found("/m/a.gguf"), found("/m/mmproj-a.gguf")]
    broken = ModelInvalid("cut off")
    assert projector_going_with("/m/a.gguf", [*folder, found("/m/b.gguf", broken)]) is None
    elsewhere = found("/n/b.gguf", broken)
    assert projector_going_with("/m/a.gguf", [*folder, elsewhere]) == "/m/mmproj-a.gguf"
