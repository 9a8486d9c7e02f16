"""Numbers, words and masks are parsed like in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.embedded.option import (
    InvalidValue,
    cpu_mask,
    cpu_range,
    existing_folder,
    file_text,
    integer,
    items,
    number,
    three_way,
    unsigned,
)


def cpus(mask: list[bool]) -> list[int]:
    return [cpu for cpu, used in enumerate(mask) if used]


@pytest.mark.parametrize(
    ("word", "value"), [("8192", 8192), (" -1", -1), ("+4", 4), ("8192x", 8192), ("8.9", 8)]
)
def test_whole_numbers_end_where_the_digits_end_as_in_cpp(word: str, value: int) -> None:
    assert integer(word) == value


@pytest.mark.parametrize("word", ["", "x8", "-", "2147483648", "99999999999"])
def test_number_outside_32_bits_is_rejected_with_its_value(word: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        integer(word)
    assert repr(word) in str(refused.value)


def test_seed_minus_one_wraps_to_the_random_seed() -> None:
    assert unsigned("-1") == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("word", "value"), [("0.7", 0.7), ("1", 1.0), (".5", 0.5), ("1e-2", 0.01), ("-1.0", -1.0)]
)
def test_numbers_are_read_with_fraction_and_exponent(word: str, value: float) -> None:
    assert number(word) == value


@pytest.mark.parametrize("read", [number, unsigned])
def test_text_is_not_a_number(read: type) -> None:
    with pytest.raises(InvalidValue, match="'warm'"):
        read("warm")


def test_on_off_and_auto_have_llama_servers_synonyms() -> None:
    assert [three_way(word) for word in ("on", "enabled", "true", "1")] == [True] * 4
    assert [three_way(word) for word in ("off", "disabled", "false", "0")] == [False] * 4
    assert [three_way(word) for word in ("auto", "-1")] == [None] * 2
    with pytest.raises(InvalidValue, match="'maybe'"):
        three_way("maybe")


def test_empty_parts_between_commas_are_none() -> None:
    assert items("a,,b,") == ["a", "b"]


def test_a_cpu_mask_counts_from_its_last_digit() -> None:
    assert cpus(cpu_mask("0x5")) == [0, 2]
    assert cpus(cpu_mask("f0")) == [4, 5, 6, 7]
    with pytest.raises(InvalidValue, match="'zz'"):
        cpu_mask("zz")


def test_a_cpu_range_includes_both_ends_and_may_leave_one_out() -> None:
    assert cpus(cpu_range("2-4")) == [2, 3, 4]
    assert cpus(cpu_range("-1")) == [0, 1]
    assert cpus(cpu_range("510-")) == [510, 511]
    for word in ("3", "a-b", "0-512", "600-"):
        with pytest.raises(InvalidValue, match="invalid range"):
            cpu_range(word)


def test_a_folder_must_exist_and_is_kept_with_a_slash(tmp_path: Path) -> None:
    assert existing_folder(str(tmp_path)) == f"{tmp_path}/" == existing_folder(f"{tmp_path}/")
    with pytest.raises(InvalidValue, match="not a directory"):
        existing_folder(str(tmp_path / "none"))


def test_a_file_that_cannot_be_read_is_a_bad_value(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    assert file_text(str(tmp_path / "template")) == "{{ messages }}"
    with pytest.raises(InvalidValue, match="failed to open file"):
        file_text(str(tmp_path / "none"))
