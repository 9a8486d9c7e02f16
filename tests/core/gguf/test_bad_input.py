"""Headers that lie: each ends in an error that names the field and the offset, soon and in little memory."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamasup.core.gguf import architectures
from llamasup.core.gguf import facts_from_header as gguf
from llamasup.core.gguf.facts import ModelFacts, read_chat_template
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.gguf.header import NeedMore
from llamasup.core.gguf.not_gguf import describe
from llamasup.core.system.hardware.facts import Hardware
from llamasup.errors import ModelInvalid
from llamasup.features.doctor.inspection import fits_here, model_as_json
from tests.kit.extent import examples
from tests.kit.gguf_writer import I32, KeyValue, TensorPlan, write_gguf
from tests.kit.tiny import tiny_keys, tiny_tensors

U8, U32, STRING, ARRAY = 0, 4, 8, 9

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("template", "system"),
    [
        ("{{" * MEGABYTE, False),
        ("{{ a" * MEGABYTE, False),
        ("{{ " + "a" * MEGABYTE, False),
        ("raise_exception(" * MEGABYTE, False),
        ("raise_exception('" + "system" * MEGABYTE + "')", True),
        ("{{" * MEGABYTE + " m.role }}", True),
        ("raise_exception(" * MEGABYTE + "'System role not supported') system", False),
    ],
    ids=range(7),
)
def test_chat_template_is_read_in_linear_time(template: str, system: bool) -> None:
    """A regular expression that goes back holds the interpreter's lock for hours."""
    assert read_chat_template(template).system is system


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def key(name: str, type_id: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", type_id) + value


def array(item_type: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item_type, count) + items


def tensor(
    name: str, dimensions: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0, count: int | None = None
) -> bytes:
    count = len(dimensions) if count is None else count
    packed = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return text(name) + struct.pack("<I", count) + packed + struct.pack("<IQ", type_id, offset)


def header(
    *keys: bytes,
    tensors: tuple[bytes, ...] = (),
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys) + b"".join(tensors) + bytes(256)


def refusal(content: bytes, file_bytes: int | None = None) -> str:
    with pytest.raises(ModelInvalid) as caught:
        read_header(content, len(content) if file_bytes is None else file_bytes)
    assert caught.value.remedy
    return caught.value.message


def demo(words: int = 4, **changes: Any) -> bytes:
    """A small valid model with some keys changed; None removes one."""
    names = [f"word{index}" for index in range(words)]
    keys: dict[str, KeyValue] = tiny_keys(names)
    for name, value in changes.items():
        key_name = name.replace("__", ".")
        keys.pop(key_name, None)
        if value is not None:
            keys[key_name] = value
    return write_gguf(keys, tiny_tensors(names))


# --- lengths and counts --------------------------------------------------------------------------


def test_a_string_of_2_to_the_63_bytes() -> None:
    lying = header(text("general.name") + struct.pack("<IQ", STRING, 1 << 63))
    message = refusal(lying, 1 << 40)
    assert message == (
        "general.name at offset 48 claims 9223372036854775808 bytes, but the file has only 1099511627720 more"
    )


def test_a_key_with_a_name_longer_than_the_format_allows() -> None:
    message = refusal(header(text("k" * 70_000)))
    assert message == "the name of key 0 at offset 24 is 70000 bytes long, at most 65535"


def test_a_key_without_a_name() -> None:
    assert refusal(header(key("", U8, b"\0"))) == "the name of key 0 at offset 24 is empty"


def test_an_array_of_2_to_the_40_numbers() -> None:
    message = refusal(header(key("a.b", ARRAY, array(U32, 1 << 40))))
    assert message.startswith("a.b at offset 43 is 1099511627776, which needs 4398046511104 bytes")


def test_an_array_of_2_to_the_40_strings() -> None:
    message = refusal(header(key("a.b", ARRAY, array(STRING, 1 << 40))))
    assert message.startswith("a.b at offset 43 is 1099511627776, which needs")


def test_a_string_in_an_array_that_leads_outside_the_file() -> None:
    strings = text("one") + struct.pack("<Q", (1 << 64) - 3) + bytes(100)
    message = refusal(header(key("a.b", ARRAY, array(STRING, 3, strings))))
    assert message.startswith("a string in 'a.b' at offset 62 claims 18446744073709551613 bytes")


def test_the_last_string_in_an_array_leads_outside_the_file() -> None:
    strings = text("one") + struct.pack("<Q", 1 << 20)
    message = refusal(header(key("a.b", ARRAY, array(STRING, 2, strings))))
    assert message.startswith("a string in 'a.b' at offset 62 claims 1048576 bytes")


def test_a_file_that_ends_between_the_strings_of_an_array() -> None:
    content = header(key("a.b", ARRAY, array(STRING, 3, text("one") + text("two") * 2)))
    cut = content[: content.index(b"two") + 3 + 4]
    assert refusal(cut) == (
        "truncated: the file ends after 77 bytes, inside its header (the strings of 'a.b' at offset 73)"
    )


@pytest.mark.parametrize(("field", "offset"), [("tensor", 8), ("key", 16)])
def test_a_count_that_overflows(field: str, offset: int) -> None:
    count = (1 << 64) - 1
    lying = header(tensor_count=count) if field == "tensor" else header(key_count=count)
    message = refusal(lying)
    assert message.startswith(f"the {field} count at offset {offset} is 18446744073709551615, which needs")


@pytest.mark.parametrize("field", ["tensor", "key"])
def test_a_count_that_no_model_has(field: str) -> None:
    count = 1_000_000
    lying = header(tensor_count=count) if field == "tensor" else header(key_count=count)
    assert "is 1000000, more than any model has" in refusal(lying, 1 << 40)


def test_a_nested_array() -> None:
    message = refusal(header(key("a.b", ARRAY, array(ARRAY, 1, array(U32, 1, bytes(4))))))
    assert message == "a.b at offset 39 is an array of arrays, which llama.cpp does not read"


def test_an_array_of_an_unknown_type() -> None:
    assert (
        refusal(header(key("a.b", ARRAY, array(99, 1))))
        == "a.b at offset 39 is an array of the unknown type 99"
    )


def test_a_value_of_an_unknown_type() -> None:
    assert refusal(header(key("a.b", 99, b""))) == "a.b at offset 35 has the unknown type 99"


def test_duplicate_key() -> None:
    twice = header(key("a.b", U8, b"\1"), key("a.b", U8, b"\2"))
    assert refusal(twice) == "key 'a.b' at offset 40 appears twice, first at offset 39"


@pytest.mark.parametrize("value", [0, 24, -32, "32", True])
def test_alignment_that_is_not_a_power_of_two(value: KeyValue) -> None:
    assert "general.alignment at offset" in refusal(demo(general__alignment=value))


def test_values_of_many_megabytes() -> None:
    strings = [key(f"k{index}", STRING, text(b"x" * 900_000)) for index in range(4)]
    assert "brings the values to more than 8 MiB" in refusal(header(*strings))


def test_string_that_is_too_long_is_skipped() -> None:
    facts = read_header(*whole(demo(tokenizer__huggingface__json="x" * 2_000_000)))
    assert isinstance(facts, ModelFacts)


def test_string_that_is_not_utf8_is_read_with_replacement_characters() -> None:
    content = demo(general__name="name").replace(
        b"\x04" + bytes(7) + b"name", b"\x04" + bytes(7) + b"n\xff\xfee"
    )
    facts = read_header(*whole(content))
    assert isinstance(facts, ModelFacts)
    assert facts.name == "n\ufffd\ufffde"


def whole(content: bytes) -> tuple[bytes, int]:
    return content, len(content)


# --- tensors -------------------------------------------------------------------------------------


def test_a_tensor_offset_past_the_end_of_the_file() -> None:
    message = refusal(header(tensors=(tensor("t", offset=1 << 60),)))
    assert message == "the offset of tensor 't' at offset 49 is 1152921504606846976, expected 0"


def test_tensors_that_overlap() -> None:
    message = refusal(header(tensors=(tensor("t"), tensor("u", offset=0))))
    assert message == "the offset of tensor 'u' at offset 82 is 0, expected 32"


def test_a_tensor_that_is_there_twice() -> None:
    message = refusal(header(tensors=(tensor("t"), tensor("t", offset=32))))
    assert message == "the name of tensor 1 at offset 57 is 't', twice"


def test_a_tensor_without_a_name() -> None:
    assert refusal(header(tensors=(tensor(""),))) == "the name of tensor 0 at offset 24 is '', empty"


def test_a_tensor_name_longer_than_ggml_allows() -> None:
    message = refusal(header(tensors=(tensor("t" * 64),)))
    assert message == "the name of tensor 0 at offset 24 is 64 bytes long, at most 63"


def test_a_tensor_of_five_dimensions() -> None:
    message = refusal(header(tensors=(tensor("t", (1,) * 5),)))
    assert message == "the number of dimensions of tensor 't' at offset 33 is 5, at most 4"


def test_a_tensor_whose_size_overflows() -> None:
    message = refusal(header(tensors=(tensor("t", (1 << 62, 1 << 62)),)))
    assert message.startswith("the size of tensor 't' at offset 37 would be")


def test_a_tensor_row_that_its_type_cannot_pack() -> None:
    message = refusal(header(tensors=(tensor("t", (33,), type_id=8),)))
    assert message == (
        "the first dimension of tensor 't' at offset 37 is 33, "
        "not a multiple of the 32 that Q8_0 packs together"
    )


def test_an_unknown_quantisation() -> None:
    message = refusal(header(tensors=(tensor("t", type_id=77),)))
    assert message == "the type of tensor 't' at offset 45 is 77, an unknown quantisation"


def test_a_quantisation_that_llama_cpp_has_removed() -> None:
    message = refusal(header(tensors=(tensor("t", type_id=31),)))
    assert message == "the type of tensor 't' at offset 45 is 31, Q4_0_4_4, which llama.cpp has removed"


def test_truncated_file_is_reported_with_its_percentage() -> None:
    content = demo()
    half = content[: len(content) // 2]
    share = 100 * len(half) / len(content)
    assert refusal(half) == f"truncated: {len(half)} of {len(content)} bytes, {share:.1f} %"


def test_a_file_that_ends_inside_its_header() -> None:
    content = demo()
    end = content.rindex(b"output.weight") + len(b"output.weight") + 4 + 3
    message = refusal(content[:end])
    assert message == (
        f"truncated: the file ends after {end} bytes, inside its header "
        f"(the shape of tensor 'output.weight' at offset {end - 3})"
    )


# --- the model's keys ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama__block_count": 0}, r"llama\.block_count at offset \d+ is 0, expected 1 to"),
        ({"llama__block_count": None}, r"llama\.block_count is missing"),
        ({"llama__block_count": "two"}, r"llama\.block_count at offset \d+ is 'two', not a whole number"),
        (
            {"llama__block_count": [1, 2]},
            r"llama\.block_count at offset \d+ is an array of 2 i32, not a whole",
        ),
        (
            {"llama__block_count": 1_000_000},
            r"llama\.block_count at offset \d+ is 1000000, more than any model",
        ),
        ({"llama__block_count": I32(-2)}, r"llama\.block_count at offset \d+ is -2, expected"),
        ({"llama__context_length": 0}, r"llama\.context_length at offset \d+ is 0"),
        ({"llama__embedding_length": None}, r"llama\.embedding_length is missing"),
        (
            {"llama__attention__head_count": 3, "llama__attention__head_count_kv": None},
            r"head_count at offset \d+ is 3, which does not divide the width 64",
        ),
        (
            {"llama__attention__head_count": 4, "llama__attention__head_count_kv": 3},
            r"head_count_kv at offset \d+ is 3 for 4 heads in layer 0",
        ),
        (
            {"llama__attention__head_count": [2, 2, 2]},
            r"llama\.attention\.head_count at offset \d+ has 3 entries of i32 for 2 layers",
        ),
        (
            {"llama__attention__head_count": ["a", "b"]},
            r"llama\.attention\.head_count at offset \d+ has 2 entries of str",
        ),
        (
            {"llama__attention__head_count": [2.5, 2.5]},
            r"head_count at offset \d+ is 2\.5, not a whole number",
        ),
        ({"llama__attention__causal": 1}, r"llama\.attention\.causal at offset \d+ is 1, not true or false"),
        ({"llama__pooling_type": "newest"}, r"llama\.pooling_type at offset \d+ "),
        ({"llama__pooling_type": 9}, r"llama\.pooling_type at offset \d+ is 9, known are 0 to 4"),
        ({"general__name": 5}, r"general\.name at offset \d+ is 5, not a string"),
        (
            {"tokenizer__ggml__tokens": "many"},
            r"tokenizer\.ggml\.tokens at offset \d+ is 'many', not an array",
        ),
        ({"split__count": 2, "split__no": 2}, r"split\.no at offset \d+ is 2, but there are only 2 parts"),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_key_that_no_model_can_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelInvalid, match=message) as caught:
        read_header(*whole(demo(**change)))
    assert caught.value.remedy


def test_a_file_with_neither_tensors_nor_an_architecture() -> None:
    assert "general.architecture is missing or empty" in refusal(write_gguf({}, []))


def test_a_file_with_neither_tensors_nor_vocabulary() -> None:
    empty = write_gguf({"general.architecture": "llama"}, [])
    assert "neither tensors (the tensor count at offset 8 is 0) nor a vocabulary" in refusal(empty)


# --- not GGUF at all -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begins", "word", "remedy"),
    [
        (b"lmgg\1\0\0\0", "ggml format that llama.cpp dropped in August 2023", "Download a .gguf"),
        (b"ggjt\1\0\0\0", "the ggjt format", "Download a .gguf"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4368439584\n",
            "a git-lfs pointer for a file of 4368439584 bytes, not the file itself",
            "git lfs pull",
        ),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer, not", "git lfs pull"),
        (struct.pack("<Q", 300) + b'{"__metadata__":{}', "a .safetensors file", "convert_hf_to_gguf"),
        (b"PK\x03\x04" + bytes(30), "a zip archive: PyTorch weights", "convert_hf_to_gguf"),
        (b"<!DOCTYPE html><html>", "a web page", "/resolve/main/"),
        (b"\n  <html>", "a web page", "/resolve/main/"),
        (b'{"error":"Repository not found"}', "JSON: the download returned an error", "again"),
        (b"Entry not found" + bytes(20), "an error message of the download", "again"),
        (bytes(64), "zero bytes: a download that reserved its space", "again"),
        (b"\x1f\x8b\x08" + bytes(30), "a gzip archive", "gunzip"),
        (b"Rar!" + bytes(30), "a RAR archive", "Unpack"),
        (b"something else entirely", "begins with 'somethin'", "give the path of a .gguf file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_something_else_is_recognised(begins: bytes, word: str, remedy: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        read_header(*whole(begins.ljust(24, begins[-1:])))
    assert caught.value.message.startswith("not a GGUF file: it begins with ")
    assert word in caught.value.message
    assert remedy in caught.value.remedy


def test_an_empty_file() -> None:
    assert refusal(b"") == "the file is empty"


def test_a_file_of_a_few_bytes() -> None:
    assert refusal(b"GGUF\3\0\0\0") == "the file has 8 bytes, and the shortest GGUF header has 24"
    assert refusal(b"GG") == "not a GGUF file: it begins with 'GG'"


@pytest.mark.parametrize(
    ("begins", "shown"),
    [
        (b"<html>40", "'<html>40'"),
        (b"PK\x03\x04\0\0\0\0", "50 4b 03 04 00 00 00 00"),
        ("é".encode() * 8, "c3 a9 c3"),
    ],
)
def test_how_a_file_begins_is_shown_as_people_write_it(begins: bytes, shown: str) -> None:
    assert f"it begins with {shown}" in refusal(begins.ljust(24, begins[-1:]))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (struct.pack("<I", 1), "the version at offset 4 is 1, which llama.cpp no longer reads (2023)"),
        (struct.pack(">I", 1), "the version at offset 4 is 1, which llama.cpp no longer reads (2023)"),
        (struct.pack("<I", 7), "the version at offset 4 is 7, and llamasup reads only 2 and 3"),
        (struct.pack(">I", 7), "the version at offset 4 is 7, and llamasup reads only 2 and 3"),
    ],
)
def test_a_version_that_is_not_read(version: bytes, message: str) -> None:
    assert refusal(b"GGUF" + version + bytes(64)) == message


def test_reader_asks_for_more_bytes_of_a_short_header() -> None:
    assert read_header(b"GG", 1 << 20) == NeedMore(64 * 1024)
    assert describe(b"", 0) == ("the file is empty", "Download the model file again.")


# --- bounds --------------------------------------------------------------------------------------


def read_in_pieces(content: bytes, file_bytes: int) -> int:
    """Read as an effect would, from a file that goes on with zeros; returns how many rounds it took."""
    given, rounds = 0, 0
    while True:
        rounds += 1
        beginning = content[:given].ljust(given, b"\0")
        try:
            outcome = read_header(beginning, file_bytes)
        except ModelInvalid:
            return rounds
        if isinstance(outcome, ModelFacts):
            return rounds
        assert given < outcome.bytes_needed <= file_bytes
        given = outcome.bytes_needed


@pytest.mark.check("X12")
def test_a_header_that_never_ends_is_given_up_after_32_mib_and_in_little_memory() -> None:
    lying = header(key("tokenizer.ggml.tokens", ARRAY, array(U8, 1 << 35)))
    tracemalloc.start()
    try:
        rounds = read_in_pieces(lying, 1 << 36)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rounds <= 4
    # The piece itself is 32 MiB, and this test's own padding of it makes a second one.
    assert peak_bytes < 2 * 33 * 1024 * 1024 + 5_000_000
    assert "does not end within 32 MiB" in refusal(lying.ljust(32 * 1024 * 1024, b"\0"), 1 << 36)


SMALL = demo(words=2)
SMALL_HEADER = SMALL[: SMALL.index(b"output.weight") + 64]


@pytest.mark.check("X12", "fuzzed")
@settings(max_examples=examples(400))
@given(
    st.lists(st.tuples(st.integers(0, len(SMALL_HEADER) - 1), st.binary(min_size=1, max_size=8)), max_size=4),
    st.integers(0, len(SMALL)),
    st.booleans(),
)
def test_no_damage_leads_to_anything_but_facts_or_an_error_that_names_it(
    patches: list[tuple[int, bytes]], length: int, cut: bool
) -> None:
    content = bytearray(SMALL)
    for at, patch in patches:
        content[at : at + len(patch)] = patch
    damaged = bytes(content[:length] if cut else content)
    assert read_in_pieces(damaged, len(damaged)) <= 4


@settings(max_examples=examples(200))
@given(st.binary(max_size=400), st.integers(0, 1 << 40))
def test_no_noise_after_the_magic_leads_to_anything_but_an_error(noise: bytes, more: int) -> None:
    content = b"GGUF" + struct.pack("<I", 3) + noise
    assert read_in_pieces(content, len(content) + more) <= 6


def test_a_tensor_without_dimensions_has_one_element() -> None:
    keys = tiny_keys(["a"])
    facts = read_header(*whole(write_gguf(keys, [(TensorPlan("one", (1,)), bytes(4))])))
    assert isinstance(facts, ModelFacts)
    assert facts.parameters == 1


# --- any keys in a sound container ---------------------------------------------------------------

# Every key that the readers look for, found in their sources so that a new one is tried as well.
CORE = Path(gguf.__file__).parent
LOOKED_FOR = sorted(
    {
        key
        for source in ("facts_from_header.py", "architectures.py")
        for key in re.findall(
            r'"((?:\{a\}|general|tokenizer|split|adapter)\.[\w.]+)"', (CORE / source).read_text()
        )
    }
    - {"general.architecture"}
)
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 7, 32, 64, 255, 4096, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**63])
VALUES: st.SearchStrategy[KeyValue] = st.one_of(
    NUMBERS,
    st.integers(-(2**31), 2**32 - 1),
    st.booleans(),
    st.floats(width=32),
    st.text(max_size=8),
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    st.lists(st.text(max_size=3), max_size=5),
    st.just([1, 0, 2, 1]),
)
MACHINE = Hardware(
    platform="linux",
    cpus_allowed=2,
    physical_cores=2,
    cpu_quota=None,
    memory_total_bytes=8 << 30,
    memory_available_bytes=4 << 30,
    memlock_limit_bytes=None,
    may_raise_priority=False,
)


def test_the_keys_that_are_looked_for_were_found_in_the_sources() -> None:
    assert {"{a}.block_count", "{a}.attention.head_count_kv", "{a}.ssm.state_size"} <= set(LOOKED_FOR)


@settings(max_examples=examples(400))
@given(
    st.sampled_from(sorted({*architectures.KNOWN, "new-architecture", "flux", ""})),
    st.dictionaries(st.sampled_from(LOOKED_FOR), VALUES, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_any_keys_give_an_error_or_a_model_that_can_be_shown(
    architecture: str, changes: dict[str, KeyValue], big_endian: bool, with_tensor: bool
) -> None:
    keys: dict[str, KeyValue] = {
        "general.architecture": architecture,
        "{a}.block_count": 4,
        "{a}.context_length": 512,
        "{a}.embedding_length": 64,
        "{a}.attention.head_count": 2,
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    named = {key.replace("{a}", architecture): value for key, value in (keys | changes).items()}
    tensors = [(TensorPlan("blk.0.ffn_up_exps.weight", (32,)), bytes(128))] if with_tensor else []
    content = write_gguf(named, tensors, big_endian=big_endian)
    try:
        facts = read_header(content, len(content))
    except ModelInvalid as refused:
        told = bool(refused.message and refused.remedy)
    else:
        assert isinstance(facts, ModelFacts)
        told = bool(json.dumps(model_as_json("m.gguf", facts, fits_here(facts, MACHINE))))
    assert told
