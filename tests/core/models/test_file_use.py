"""Which files of a model may be removed, and which models are gone with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from llamasup.core.models.file_use import ServedFiles, models_gone_with
from llamasup.core.models.removal import entries_of
from llamasup.core.models.rules import ModelRule
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.projectors import Candidate, Pairing
from llamasup.core.settings.model import ModelSettings, Settings
from llamasup.errors import Conflict

FAR = "/models/org/far/far-Q4_K_M.gguf"
PROJECTOR = "/models/org/far/mmproj-far.gguf"
PARTS = tuple(f"/models/big-0000{number}-of-00002.gguf" for number in (1, 2))
LINKED = "/models/link.gguf"
NONE = ModelSettings()


def entries(path: str) -> Sequence[str]:
    if path in PARTS:
        return PARTS
    return (path, FAR) if path == LINKED else (path,)


def gone(
    removed: ServedFiles,
    *others: ServedFiles,
    going: Sequence[str] = (FAR,),
    rules: Sequence[ModelRule] = (),
    defaults: ModelSettings = NONE,
) -> tuple[str, ...]:
    served = (removed, *others)
    return models_gone_with(removed.spec, frozenset(going), rules, defaults, served, entries)


def file(path: str, name: str = "far") -> ServedFiles:
    return ServedFiles(ModelSpec(name, path, identity=((path, 1, 1),)))


def repo(name: str) -> ServedFiles:
    return ServedFiles(ModelSpec(name, "org/far:Q4_K_M"), (FAR,))


def rule(name: str, source: str | None = None, **options: object) -> ModelRule:
    return ModelRule(name, source, options=ModelSettings(**options))  # type: ignore[arg-type]


def paired(name: str, path: str) -> ServedFiles:
    pairing = Pairing(Candidate(PROJECTOR, None), "the only one")  # type: ignore[arg-type]
    return ServedFiles(ModelSpec(name, path, pairing=pairing))


CONFIG = "the config names its file"
OTHER = "the model 'b' of the config uses it"


@pytest.mark.parametrize(
    ("removed", "others", "going", "rules", "why"),
    [
        pytest.param(file(FAR), [], [FAR], [rule("a", FAR)], CONFIG, id="its own path"),
        pytest.param(file(PARTS[0]), [], PARTS, [rule("a", PARTS[1])], CONFIG, id="another part of it"),
        pytest.param(
            repo("hf.co/org/far"), [file(FAR, "b")], [FAR], [rule("b", FAR)], CONFIG, id="on demand"
        ),
        pytest.param(
            repo("small"),
            [],
            [FAR],
            [rule("small", "org/far:Q4_K_M"), rule("b", "/b.gguf", draft_model=FAR)],
            CONFIG,
            id="draft model of another",
        ),
        pytest.param(
            file(FAR), [], [FAR, PROJECTOR], [rule("b", "/b.gguf", mmproj=PROJECTOR)], CONFIG, id="projector"
        ),
        pytest.param(
            repo("a"),
            [repo("b")],
            [FAR],
            [rule("a", "org/far:Q4_K_M"), rule("b", "org/far:Q4_K_M", ctx_size=512)],
            OTHER,
            id="other options",
        ),
        pytest.param(file(FAR), [], [FAR], [rule("*", loras=("/x.gguf", FAR))], CONFIG, id="rule of many"),
        pytest.param(file(FAR), [], [FAR], [rule("far", threads=1)], CONFIG, id="only its id"),
        pytest.param(file(FAR), [], [FAR], [rule("b", "/b.gguf", extra=("-md", FAR))], CONFIG, id="argument"),
        pytest.param(
            file(FAR), [], [FAR], [rule("b", "/b.gguf", extra=(f"-x=y,{FAR}:0.5",))], CONFIG, id="in a list"
        ),
        pytest.param(file(FAR), [], [FAR], [rule("b", LINKED)], CONFIG, id="through a link"),
        pytest.param(file(FAR), [file(LINKED, "b")], [FAR], [], "'b' uses it", id="linked model"),
        pytest.param(
            file(FAR), [paired("b", "/models/b.gguf")], [FAR, PROJECTOR], [], "'b' uses it", id="shared"
        ),
    ],
)
def test_file_that_something_else_needs_stays(
    removed: ServedFiles,
    others: Sequence[ServedFiles],
    going: Sequence[str],
    rules: Sequence[ModelRule],
    why: str,
) -> None:
    with pytest.raises(Conflict, match=why):
        gone(removed, *others, going=going, rules=rules)


def test_file_of_the_defaults_stays() -> None:
    with pytest.raises(Conflict, match=CONFIG):
        gone(file(FAR), defaults=ModelSettings(draft_model=FAR))


def test_other_names_of_the_file_are_gone_with_it() -> None:
    unrelated = file("/models/other.gguf", "other")
    missing = ServedFiles(ModelSpec("missing", "org/missing"))
    others = (repo("hf.co/org/far"), unrelated, missing, ServedFiles(ModelSpec("nothing", "")))
    assert gone(file(FAR), *others, rules=[rule("other", "/models/other.gguf"), rule("*", threads=1)]) == (
        "far",
        "hf.co/org/far",
    )


def test_model_with_a_repository_in_the_config_may_go() -> None:
    assert gone(repo("a"), rules=[rule("a", "org/far:Q4_K_M")]) == ("a",)


def test_adapters_and_projectors_are_files_of_their_model() -> None:
    spec = ModelSpec("a", FAR, settings=Settings(adapters=("/models/a.gguf",)))
    with pytest.raises(Conflict, match="'a' uses it"):
        gone(file("/models/a.gguf", "b"), ServedFiles(spec), going=["/models/a.gguf"])


def test_entries_are_links_and_all_parts(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.symlink_to(folder)
    for name in ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y.gguf"):
        (folder / name).write_bytes(b"")
    (folder / "link.gguf").symlink_to("y.gguf")
    (folder / "circle.gguf").symlink_to("circle.gguf")

    def of(name: str) -> list[str]:
        return [str(Path(entry).relative_to(folder)) for entry in entries_of(str(other / name))]

    assert of("x-00002-of-00002.gguf") == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    assert of("link.gguf") == ["link.gguf", "y.gguf"]
    assert set(of("circle.gguf")) == {"circle.gguf"}
    assert of("x-00003-of-00002.gguf") == ["x-00003-of-00002.gguf"]
