"""The models that a virtual model stands for, and names that lead nowhere."""

from __future__ import annotations

import pytest

from llamasup.errors import ConfigInvalid
from llamasup.features.virtual.settings import (
    MAX_CANDIDATES,
    MAX_CHAIN,
    Candidate,
    Changes,
    VirtualEntry,
    candidates_of,
    check_virtual,
    virtual_mistakes,
)


def test_name_without_changes_only_stands_for_its_model() -> None:
    assert candidates_of({"a": VirtualEntry(model="m")}) == {"a": (Candidate("m"),)}


def test_changes_of_a_chain_apply_from_the_name_of_the_client_to_the_model() -> None:
    entries = {
        "outer": VirtualEntry(model="inner", set={"top_k": 1}),
        "inner": VirtualEntry(model="m", system="Be brief."),
    }
    assert candidates_of(entries)["outer"] == (
        Candidate("m", (Changes(set={"top_k": 1}), Changes(system="Be brief."))),
    )


def test_any_may_contain_virtual_models_and_names_each_model_once() -> None:
    entries = {
        "any": VirtualEntry(any=("a", "other", "b")),
        "other": VirtualEntry(any=("b", "a", "c")),
    }
    assert candidates_of(entries)["any"] == (Candidate("a"), Candidate("b"), Candidate("c"))


def test_of_one_model_with_different_changes_the_first_counts() -> None:
    entries = {"any": VirtualEntry(any=("cold", "m")), "cold": VirtualEntry(model="m", set={"top_k": 1})}
    assert candidates_of(entries)["any"] == (Candidate("m", (Changes(set={"top_k": 1}),)),)


def test_virtual_model_is_found_in_any_spelling() -> None:
    entries = {"any": VirtualEntry(any=("COLD:latest", "M")), "cold": VirtualEntry(model="m")}
    assert candidates_of(entries)["any"] == (Candidate("m"), Candidate("M"))


def mistakes(entries: dict[str, VirtualEntry]) -> list[tuple[str, str]]:
    return list(virtual_mistakes(entries))


def test_names_that_lead_to_models_are_right() -> None:
    assert mistakes({"a": VirtualEntry(model="b"), "b": VirtualEntry(any=("m", "n"))}) == []


def test_circle_is_a_mistake_of_one_of_its_names() -> None:
    entries = {"a": VirtualEntry(model="b"), "b": VirtualEntry(any=("m", "a"))}
    assert mistakes(entries) == [
        ("b", "the virtual models go round in a circle (a → b → a); one has to name a model")
    ]
    for spelling in ("a", "A", "a.gguf"):
        (mistake,) = mistakes({"a": VirtualEntry(model=spelling)})
        assert "(a → a)" in mistake[1]


def test_two_spellings_of_one_name_are_a_mistake() -> None:
    entry = VirtualEntry(model="m")
    assert mistakes({"v": entry, "V": entry}) == [("V", "is another spelling of 'v'; choose another name")]


@pytest.mark.parametrize("reverse", [False, True])
def test_too_long_chain_is_reported_once_whatever_the_order(reverse: bool) -> None:
    names = [f"v{number}" for number in range(MAX_CHAIN + 1)]
    entries = {name: VirtualEntry(model=after) for name, after in zip(names, [*names[1:], "m"], strict=True)}
    if reverse:
        entries = dict(reversed(entries.items()))
    (mistake,) = mistakes(entries)
    assert "virtual models in a row" in mistake[1]
    del entries[names[0]]
    assert mistakes(entries) == []


def test_very_long_chain_does_not_exhaust_the_stack() -> None:
    entries = {f"v{number}": VirtualEntry(model=f"v{number + 1}") for number in range(5000)}
    assert mistakes(entries)
    assert mistakes(dict(reversed(entries.items())))


def test_lists_of_lists_cannot_multiply_without_limit() -> None:
    entries = {"v0": VirtualEntry(any=tuple(f"m{number}" for number in range(MAX_CANDIDATES)))}
    assert mistakes(entries) == []
    entries |= {
        f"v{number}": VirtualEntry(any=(f"v{number - 1}",) * 40, set={"seed": number})
        for number in range(1, MAX_CHAIN)
    }
    assert mistakes(entries)[0] == ("v1", f"stands for {40 * MAX_CANDIDATES} models; at most 64 are allowed")


def test_config_of_a_program_is_checked() -> None:
    check_virtual({"a": VirtualEntry(model="m")})
    with pytest.raises(ConfigInvalid, match="'a': has neither model nor any"):
        check_virtual({"a": VirtualEntry()})
    with pytest.raises(ConfigInvalid, match="circle"):
        check_virtual({"a": VirtualEntry(model="a")})
