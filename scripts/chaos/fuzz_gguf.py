"""Coverage-guided fuzzing of all code that reads a model file's header (X12). Run it with scripts/chaos/fuzz.

The fuzzer reads a header, computes its facts, and formats them as ``llamasup inspect`` does. Findings: any
exception but ModelInvalid, a run of more than ``-timeout`` seconds, a process of more than ``-rss_limit_mb``.
libFuzzer keeps the input of each finding. The arguments are those of libFuzzer. The first folder is the
corpus, which gets the seeds.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["llamasup"]):
    from llamasup.core.gguf import architectures
    from llamasup.core.gguf.facts import ModelFacts
    from llamasup.core.gguf.facts_from_header import facts_of, split_of
    from llamasup.core.gguf.header import Container, NeedMore, read_container
    from llamasup.core.system.hardware.facts import Hardware
    from llamasup.errors import ModelInvalid
    from llamasup.features.doctor.inspection import fits_here, model_as_json
    from tests.kit import models
    from tests.kit.gguf_writer import U16, KeyValue, TensorPlan, write_gguf, write_gguf_header
    from tests.kit.tiny import tiny_keys, tiny_tensors

# A file of this size has room for whatever a header of some KB states, so that facts are reached as well.
_LARGE_FILE_BYTES = 1 << 34
_MAX_SEED_BYTES = 16 * 1024
# Sizes, ids of types, and where numbers of 8, 16, 32 and 64 bits end.
_NUMBERS = (
    *range(34),
    64,
    127,
    255,
    512,
    4096,
    65_535,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 63,
    (1 << 64) - 1,
)

_MACHINE = Hardware("linux", 2, 2, None, 8 << 30, 4 << 30, None, may_raise_priority=False)


def fuzz_one(content: bytes) -> None:
    """The last byte decides whether the file ends with what is given or goes on."""
    given = len(content)
    file_bytes = given if content[-1:] < b"\x80" else _LARGE_FILE_BYTES
    try:
        container = read_container(content, file_bytes)
        if isinstance(container, NeedMore):
            if not given < container.bytes_needed <= file_bytes:
                raise AssertionError(f"{given} of {file_bytes} bytes given, {container} asked for")
            return
        check_container(container)
        check_facts(facts_of([container]))
    except ModelInvalid as refused:
        if not refused.message or not refused.remedy:
            raise AssertionError(f"refused without a reason or a remedy: {refused!r}") from refused


def mutate(content: bytes, most_bytes: int, seed: int) -> bytes:
    """Half of the time, change numbers in the values of keys, because blind mutations rarely hit them."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        with contextlib.suppress(ModelInvalid):
            container = read_container(content, _LARGE_FILE_BYTES)
            if isinstance(container, Container) and container.offsets:
                return _with_other_numbers(content, container, chance)[:most_bytes]
    mutated: bytes = atheris.Mutate(content, most_bytes)
    return mutated


def _with_other_numbers(content: bytes, container: Container, chance: random.Random) -> bytes:
    changed = bytearray(content)
    places = list(container.offsets.values())
    for _ in range(chance.randint(1, 4)):
        # Before the value is its type: that is worth changing too.
        at = chance.choice(places) - 4 * (chance.random() < 0.1)
        size = chance.choice((1, 4, 4, 4, 8))
        number = chance.choice(_NUMBERS) & ((1 << 8 * size) - 1)
        changed[at : at + size] = number.to_bytes(size, "big" if container.big_endian else "little")
    return bytes(changed)


def check_container(container: Container) -> None:
    split = split_of(container)
    if not 0 <= split.index < split.count:
        raise AssertionError(split)
    if container.expected_bytes > container.file_bytes:
        raise AssertionError("a truncated file was accepted")


def check_facts(facts: ModelFacts) -> None:
    for per_layer in (facts.head_counts, facts.head_counts_kv, facts.layer_bytes, facts.kv_layers):
        if len(per_layer) != facts.layers:
            raise AssertionError(f"{len(per_layer)} entries for {facts.layers} layers")
    placed = sum(facts.layer_bytes) + facts.input_bytes + facts.output_bytes
    if placed != facts.weights_bytes:
        raise AssertionError(f"{placed} bytes placed of {facts.weights_bytes}")
    msgspec.json.encode(model_as_json("m.gguf", facts, fits_here(facts, _MACHINE)))


# --- seeds ---------------------------------------------------------------------------------------


def seeds() -> Iterator[bytes]:
    """Whole small headers: one of each kind that the tests know, and one of each architecture."""
    for make in (
        models.tiny_decoder,
        models.tiny_encoder,
        models.tiny_reranker,
        models.tiny_lora,
        models.tiny_projector,
        models.vocabulary_only,
        models.big_endian_decoder,
    ):
        yield make()[:_MAX_SEED_BYTES] + b"\xff"
    keys: dict[str, KeyValue] = {**tiny_keys(["a"]), "split.no": U16(0), "split.count": U16(2)}
    yield write_gguf_header(keys, [plan for plan, _ in tiny_tensors(["a"])]) + b"\xff"
    for architecture in sorted(architectures.KNOWN):
        yield write_gguf(
            _keys_of(architecture), [(TensorPlan("blk.0.ffn_up_exps.weight", (32,)), bytes(128))]
        )


def _keys_of(architecture: str) -> dict[str, KeyValue]:
    a = architecture
    return {
        "general.architecture": a,
        "general.file_type": 7,
        f"{a}.block_count": 4,
        f"{a}.context_length": 512,
        f"{a}.embedding_length": 64,
        f"{a}.attention.head_count": [2, 2, 0, 2],
        f"{a}.attention.head_count_kv": 1,
        f"{a}.attention.sliding_window": 128,
        f"{a}.expert_count": 8,
        f"{a}.nextn_predict_layers": 1,
        f"{a}.ssm.conv_kernel": 4,
        f"{a}.ssm.inner_size": 128,
        f"{a}.ssm.state_size": 16,
        "tokenizer.ggml.tokens": ["a", "b"],
    }


def write_dictionary(path: Path) -> None:
    """The keys that the readers look for, as libFuzzer takes them."""
    room = Path(architectures.__file__).parent
    words = {
        word.removeprefix("{a}")
        for source in ("header.py", "facts_from_header.py", "architectures.py")
        for word in re.findall(
            r'"((?:\{a\}|general|tokenizer|split|adapter)\.[\w.]+)"', (room / source).read_text()
        )
    }
    path.write_text("".join(f'"{word}"\n' for word in sorted(words)))


def main() -> None:
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if not folders:
        sys.exit("name the folder of the corpus, as scripts/chaos/fuzz does")
    corpus = Path(folders[0])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:03d}").write_bytes(seed)
    dictionary = corpus.parent / "keys.dict"
    write_dictionary(dictionary)
    atheris.Setup([*sys.argv, f"-dict={dictionary}"], fuzz_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
