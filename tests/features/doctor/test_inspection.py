"""The facts of ``inspect``: whether a model fits on a machine, its projector, and the JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import PURPOSES, Experts, ModelClass, ModelFacts, RecurrentState, is_served
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.ladder import admit
from llamasup.core.planning.projectors import pairings_of
from llamasup.core.system.hardware.facts import Hardware
from llamasup.errors import ModelInvalid
from llamasup.features.doctor.inspection import (
    broken_as_json,
    fits_here,
    kv_growths,
    model_as_json,
    projectors_of,
)
from tests.core.planning import plans
from tests.kit import models

GIB = 1 << 30
# docs/design.md: these may not be renamed.
CONTRACT = [
    *("path", "file_bytes", "expected_bytes", "architecture", "class", "name", "parameters", "quantization"),
    *("layers", "context_length", "embedding_length", "head_count", "head_count_kv", "vocab_size"),
    "chat_template",
]


def facts_of(content: bytes, **changes: Any) -> ModelFacts:
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    return replace(facts, **changes)


def llama_8b(**changes: Any) -> ModelFacts:
    """Of the shape of Llama 3.1 8B in Q4_K_M."""
    weights = 4_920_000_000
    shape = {
        "layers": 32,
        "context_length": 8192,
        "embedding_length": 4096,
        "feed_forward_lengths": (14_336,) * 32,
        "head_counts": (32,) * 32,
        "head_counts_kv": (8,) * 32,
        "key_length": 128,
        "value_length": 128,
        "key_length_swa": 128,
        "value_length_swa": 128,
        "vocab_size": 128_256,
        "weights_bytes": weights,
        "kv_layers": (True,) * 32,
        "sliding_layers": (False,) * 32,
        "recurrent_layers": (False,) * 32,
    }
    return facts_of(models.tiny_decoder(), **{**shape, **changes})


def machine(free_bytes: int) -> Hardware:
    return Hardware(
        platform="linux",
        cpus_allowed=4,
        physical_cores=4,
        cpu_quota=None,
        memory_total_bytes=64 * GIB,
        memory_available_bytes=free_bytes,
        memlock_limit_bytes=None,
        may_raise_priority=False,
    )


# --- the KV cache --------------------------------------------------------------------------------


def test_kv_cache_of_plain_attention_grows_with_every_token() -> None:
    growth = kv_growths(llama_8b())["f16"]
    assert growth.bytes_per_1000_tokens == 1000 * 32 * 8 * (128 + 128) * 2
    assert growth.slot_bytes == 0


def test_q8_0_takes_34_bytes_for_32_values() -> None:
    f16, q8_0 = (growth.bytes_per_1000_tokens for growth in kv_growths(llama_8b()).values())
    assert q8_0 / f16 == 34 / 64


def test_recurrent_model_has_a_state_and_no_cache() -> None:
    model = llama_8b(
        kv_layers=(False,) * 32,
        head_counts_kv=(0,) * 32,
        recurrent=RecurrentState(1000, 2000),
        recurrent_layers=(True,) * 32,
    )
    growth = kv_growths(model)["f16"]
    assert growth.bytes_per_1000_tokens == 0
    assert growth.slot_bytes == 32 * 3000 * 4


# --- fits here -----------------------------------------------------------------------------------


def test_model_fits_with_default_sizes_in_enough_memory() -> None:
    fit = fits_here(llama_8b(), machine(16 * GIB))
    assert fit is not None
    assert fit.fits
    assert not fit.reduced
    assert (fit.ctx_size, fit.parallel, fit.kv_type) == (8192, 4, "f16")
    kv = kv_growths(llama_8b())["f16"].bytes_per_1000_tokens * 4 * 8192 // 1000
    assert fit.needed_bytes > 4_920_000_000 + kv
    assert fit.available_bytes == 16 * GIB


def test_less_memory_means_fewer_slots_then_quantized_cache_then_shorter_context() -> None:
    seen = []
    for free_mib in range(16_000, 4_000, -50):
        fit = fits_here(llama_8b(), machine(free_mib << 20))
        assert fit is not None
        if fit.fits:
            assert fit.needed_bytes <= free_mib << 20
            seen.append((fit.parallel, fit.ctx_size, fit.kv_type, fit.reduced))
    assert list(dict.fromkeys(seen)) == [
        (4, 8192, "f16", False),
        (2, 8192, "f16", True),
        (1, 8192, "f16", True),
        (1, 8192, "q8_0", True),
        (1, 4096, "q8_0", True),
        (1, 2048, "q8_0", True),
    ]


@pytest.mark.parametrize(
    "facts",
    [
        plans.model(),
        plans.model(context_length=3000),
        plans.model(key_length=80, value_length=80),
        plans.model(mtp_layers=1, drafts_itself=True),
        plans.model(sliding_window=1024, sliding_layers=(True, False) * 16),
        plans.model(head_counts_kv=(1,) * 32, key_length=576, value_length=512, mla=True),
        plans.bert(),
        plans.bert(ModelClass.RERANKER, context_length=8192),
        plans.model(architecture="t5", model_class=ModelClass.ENCODER_DECODER),
    ],
)
def test_inspect_agrees_with_plan_of_newest_build(facts: ModelFacts) -> None:
    for free_mib in range(1000, 20_000, 500):
        here = plans.machine(memory_available_bytes=free_mib << 20)
        fit = fits_here(facts, here)
        made = admit(plans.ladder(plans.NEW, facts, here), PlanLimits()).plan
        assert fit is not None
        assert (fit.parallel, fit.ctx_size, fit.kv_type) == (
            made.parallel,
            made.ctx_size_of_slot,
            made.kv_type,
        )
        assert (fit.needed_bytes, fit.fits) == (plans.needed_bytes(made), made.memory.fits)


def test_model_that_does_not_fit_shows_need_of_defaults() -> None:
    fit = fits_here(llama_8b(), machine(2 * GIB))
    plenty = fits_here(llama_8b(), machine(64 * GIB))
    assert fit is not None
    assert plenty is not None
    assert not fit.fits
    assert not fit.reduced
    assert fit.needed_bytes == plenty.needed_bytes > 4_920_000_000


def test_cache_of_odd_head_sizes_stays_f16() -> None:
    fit = fits_here(llama_8b(key_length=80, value_length=80), machine(64 * GIB))
    assert fit is not None
    assert fit.kv_type == "f16"


def test_context_is_at_most_trained_context() -> None:
    fit = fits_here(facts_of(models.tiny_encoder()), machine(GIB))
    assert fit is not None
    assert (fit.ctx_size, fit.parallel, fit.kv_type) == (512, 4, "f16")


def test_encoder_decoder_has_one_slot() -> None:
    model = facts_of(models.tiny_encoder(), model_class=ModelClass.ENCODER_DECODER)
    fit = fits_here(model, machine(GIB))
    assert fit is not None
    assert fit.parallel == 1


@pytest.mark.parametrize("make", [models.tiny_lora, models.tiny_projector, models.vocabulary_only])
def test_file_that_is_not_served_alone_has_neither_cache_nor_fit(make: Any) -> None:
    facts = facts_of(make())
    assert not is_served(facts)
    shown = as_json(facts)
    assert (shown["class"], shown["kv_cache"], shown["fits_here"]) == (facts.model_class, None, None)


def test_foreign_byte_order_does_not_fit() -> None:
    """llama-server b11434: "is there a mismatch between the host and model endianness?"."""
    facts = facts_of(models.big_endian_decoder())
    here, there = fits_here(facts, machine(GIB), "little"), fits_here(facts, machine(GIB), "big")
    assert here is not None
    assert there is not None
    assert (here.fits, here.foreign_byte_order) == (False, True)
    assert (there.fits, there.foreign_byte_order) == (True, False)


# --- projectors ----------------------------------------------------------------------------------


def test_projector_next_to_model_is_paired_as_run_pairs_it() -> None:
    decoder, encoder, projector = map(
        facts_of, (models.tiny_decoder(), models.tiny_encoder(), models.tiny_projector())
    )
    assert projectors_of(
        {
            "/m/one/eyes-Q8_0.gguf": decoder,
            "/m/one/mmproj-F16.gguf": projector,
            "/m/two/blind.gguf": decoder,
            "/m/three/embeds.gguf": encoder,
            "/m/three/mmproj.gguf": projector,
            "/m/four/a.gguf": decoder,
            "/m/four/b.gguf": decoder,
            "/m/four/mmproj.gguf": projector,
            "/m/five/mmproj-not-one.gguf": decoder,
        }
    ) == {"/m/one/eyes-Q8_0.gguf": "/m/one/mmproj-F16.gguf"}


def test_projector_may_belong_to_broken_model_in_same_folder() -> None:
    decoder, projector = facts_of(models.tiny_decoder()), facts_of(models.tiny_projector())
    folder = {"/m/eyes.gguf": decoder, "/m/mmproj-F16.gguf": projector}
    assert projectors_of(folder, ["/n/cut.gguf", "/m/mmproj-cut.gguf"]) == {
        "/m/eyes.gguf": "/m/mmproj-F16.gguf"
    }
    assert projectors_of(folder, ["/m/cut.gguf"]) == {}


def test_ambiguous_projector_is_left_out_with_reason_and_foreign_one_ignored() -> None:
    decoder, projector = facts_of(models.tiny_decoder()), facts_of(models.tiny_projector())
    two = {"/m/a.gguf": decoder, "/m/b.gguf": decoder, "/m/mmproj.gguf": projector}
    pairings = pairings_of(two)
    assert [pairings[path].projector for path in ("/m/a.gguf", "/m/b.gguf")] == [None, None]
    assert "may belong to this model or to b.gguf" in pairings["/m/a.gguf"].reason
    assert pairings_of({**two, "/m/mmproj.gguf": replace(projector, big_endian=True)}) == {}


def test_projector_among_many_models_is_paired_by_name() -> None:
    decoder, projector = facts_of(models.tiny_decoder()), facts_of(models.tiny_projector())
    heap = {f"/m/{number}.gguf": decoder for number in range(1000)}
    pairs = projectors_of({**heap, "/m/mmproj-7.gguf": projector, "/m/mmproj.gguf": projector})
    assert pairs == {"/m/7.gguf": "/m/mmproj-7.gguf"}


def test_every_class_has_a_purpose() -> None:
    assert set(PURPOSES) == set(ModelClass)


# --- as JSON -------------------------------------------------------------------------------------


def as_json(facts: ModelFacts) -> dict[str, Any]:
    shown = model_as_json("/models/m.gguf", facts, fits_here(facts, machine(16 * GIB)))
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(shown))
    return decoded


def test_json_begins_with_fields_of_contract() -> None:
    shown = as_json(facts_of(models.tiny_decoder()))
    assert list(shown)[: len(CONTRACT)] == CONTRACT
    assert shown["class"] == "decoder"
    assert shown["chat_template"] == {"present": True, "tools": False, "system": True, "reasoning": False}
    assert (shown["head_count"], shown["head_count_kv"]) == (2, 2)


def test_weights_add_up_over_layers_input_and_output() -> None:
    weights = as_json(facts_of(models.tiny_decoder()))["weights"]
    parts = ("layers_bytes", "input_bytes", "output_bytes")
    assert sum(weights[part] for part in parts) == weights["total_bytes"]
    assert 0 < weights["largest_layer_bytes"] < weights["layers_bytes"]


def test_experts_are_shown_only_for_mixture_models() -> None:
    assert as_json(facts_of(models.tiny_decoder()))["experts"] is None
    mixture = facts_of(models.tiny_decoder(), experts=Experts(count=8, used=2))
    assert as_json(mixture)["experts"] == {"count": 8, "used": 2, "shared": 0}


def test_quantized_cache_is_shown_only_if_head_sizes_allow_it() -> None:
    assert list(as_json(llama_8b())["kv_cache"]) == ["f16", "q8_0"]
    assert list(as_json(llama_8b(key_length=80, value_length=80))["kv_cache"]) == ["f16"]


def test_broken_file_is_listed_with_its_error() -> None:
    assert broken_as_json("/m/a.gguf", ModelInvalid("/m/a.gguf: bad", remedy="Get another.")) == {
        "path": "/m/a.gguf",
        "error": {"cause": "model_invalid", "message": "/m/a.gguf: bad", "remedy": "Get another."},
    }
