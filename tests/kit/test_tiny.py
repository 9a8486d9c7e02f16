"""The demo model and its writer, checked with the ``gguf`` package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gguf
import pytest

from llamasup.core.gguf.facts import ChatTemplate, ModelClass, ModelFacts, read_chat_template
from llamasup.core.gguf.facts_from_header import read_header
from tests.kit.gguf_writer import I32, U16, KeyValue, TensorPlan, write_gguf
from tests.kit.tiny import CHAT_TEMPLATE, random_weights, tiny_decoder, tiny_keys, tiny_tensors


def read_back(content: bytes, tmp_path: Path) -> Any:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return gguf.GGUFReader(path)


def test_the_demo_model_is_small_and_the_same_each_time() -> None:
    first, second = tiny_decoder(), tiny_decoder()
    assert first == second
    assert 600_000 < len(first) < 800_000
    # A change of the file changes what every installation's demo says: make it on purpose.
    assert (
        hashlib.sha256(first).hexdigest()
        == "c20f71c3f1ff78f70bb587ec8561aed4cb5dd011412d4c74cef2db195bf45279"
    )


def test_the_demo_model_is_a_chat_model_whose_kv_cache_can_be_quantised() -> None:
    content = tiny_decoder()
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert facts.model_class is ModelClass.DECODER
    assert facts.chat_template == ChatTemplate(present=True, tools=False, system=True, reasoning=False)
    assert facts.context_length == 32_768
    assert facts.quantized_kv_fits
    assert facts.expected_bytes == facts.file_bytes == len(content)


def test_gguf_package_reads_the_demo_model(tmp_path: Path) -> None:
    reader = read_back(tiny_decoder(), tmp_path)
    for key, value in tiny_keys().items():
        written = reader.fields[key].contents()
        assert written == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
    for oracle, (plan, weights) in zip(reader.tensors, tiny_tensors(), strict=True):
        assert oracle.name == plan.name
        assert tuple(int(length) for length in oracle.shape) == plan.shape
        assert oracle.data.tobytes() == weights


def test_demo_model_generates_only_words() -> None:
    tokens = tiny_keys()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    plan, weights = tiny_tensors()[-1]
    row_bytes = 4 * plan.shape[0]
    silent = [not any(weights[row * row_bytes : (row + 1) * row_bytes]) for row in range(plan.shape[1])]
    assert silent == [not (token.startswith("▁") and len(token) > 1) for token in tokens]
    assert silent.count(False) > 150


def test_random_weights_are_even_within_their_bounds_and_the_same_for_a_seed() -> None:
    weights = memoryview(random_weights(4096, 0.5, "a seed")).cast("f")
    assert random_weights(4096, 0.5, "a seed") == weights.tobytes()
    assert random_weights(4096, 0.5, "another") != weights.tobytes()
    assert min(weights) >= -0.5
    assert max(weights) <= 0.5
    assert abs(sum(weights) / len(weights)) < 0.05


# --- the writer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "value_type"),
    [
        (True, "BOOL"),
        (7, "UINT32"),
        (-7, "INT32"),
        (1 << 40, "UINT64"),
        (U16(3), "UINT16"),
        (I32(3), "INT32"),
        (0.5, "FLOAT32"),
        ("grüße", "STRING"),
        ([1, 2, 3], "INT32"),
        ([0.5, 1.5], "FLOAT32"),
        ([True, False], "BOOL"),
        (["a", "", "ü"], "STRING"),
    ],
    ids=str,
)
@pytest.mark.parametrize("big_endian", [False, True], ids=["little-endian", "big-endian"])
def test_gguf_package_reads_the_writers_files(
    value: KeyValue, value_type: str, big_endian: bool, tmp_path: Path
) -> None:
    keys: dict[str, KeyValue] = {"general.architecture": "llama", "a.key": value}
    reader = read_back(write_gguf(keys, [], big_endian=big_endian), tmp_path)
    field = reader.fields["a.key"]
    assert field.types[-1].name == value_type
    assert field.contents() == value


def test_an_empty_array_is_written_as_numbers() -> None:
    content = write_gguf({"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"], "a.key": []}, [])
    assert isinstance(read_header(content, len(content)), ModelFacts)


def test_the_writer_refuses_weights_of_another_size() -> None:
    with pytest.raises(ValueError, match="t: 8 bytes of weights, expected 16"):
        write_gguf({}, [(TensorPlan("t", (4,)), bytes(8))])


def test_the_writer_refuses_rows_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="t: rows of 33 are not multiples of 32"):
        write_gguf({}, [(TensorPlan("t", (33,), "Q8_0"), bytes(34))])


# --- chat templates ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "can"),
    [
        ("", ChatTemplate()),
        ("  \n", ChatTemplate()),
        (CHAT_TEMPLATE, ChatTemplate(present=True, system=True)),
        (
            "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
            "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
            "{% if enable_thinking %}<think>{% endif %}",
            ChatTemplate(present=True, tools=True, system=True, reasoning=True),
        ),
        (
            "{% if messages[0]['role'] == 'system' %}"
            "{{ raise_exception('System role not supported') }}{% endif %}"
            "{{ '<start_of_turn>' + message['role'] }}",
            ChatTemplate(present=True),
        ),
        ("[INST] {{ messages[0]['content'] }} [/INST]", ChatTemplate(present=True)),
    ],
    ids=["none", "blank", "ChatML", "Qwen3-like", "Gemma-like", "Mistral-like"],
)
def test_chat_template_shows_its_features(template: str, can: ChatTemplate) -> None:
    assert read_chat_template(template) == can


def test_a_second_template_for_tools_counts() -> None:
    keys = tiny_keys(["a"]) | {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    content = write_gguf(keys, tiny_tensors(["a"]))
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert facts.chat_template.tools
