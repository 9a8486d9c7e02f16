"""The memory that a real llama-server logs for models of many architectures, compared with our estimates.

The models are tiny, so that the tests can cover every shape. For models as wide as real ones, the weights are
a hole in the file: llama-server maps them, reserves the other memory, and computes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.gguf.files import read_model
from llamasup.core.llama_server.log_lines import ServerSizes, read_sizes
from llamasup.core.planning.memory.kv_cache import ContextShape, compute_bytes, kv_bytes, mtp_kv_bytes
from tests.kit import models
from tests.kit.architectures import ARCHITECTURES, Widths, tiny_model, write_hollow

MIB = 1 << 20
ROUNDING = 0.0051 * MIB  # the log has two decimals
DECODERS = tuple(name for name in ARCHITECTURES if name != "t5")


@dataclass(frozen=True)
class Logged:
    sizes: ServerSizes
    lines: list[str]

    def count(self, *words: str) -> int:
        return sum(any(word in line for word in words) for line in self.lines)


Load = Callable[..., Logged]


@contextmanager
def child(argv: Sequence[str], home: Path) -> Iterator[subprocess.Popen[str]]:
    environ = {"PATH": os.environ.get("PATH", ""), "XDG_CONFIG_HOME": str(home)}
    environ["LD_LIBRARY_PATH"] = str(Path(argv[0]).parent)
    with subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def load(runtime: str, tmp_path: Path) -> Load:
    """``load(model, *flags)``: the memory in the log of a start. Fails if the start fails."""
    command = [sys.executable, "-m", "llamasup.embedded"] if runtime == "embedded" else [runtime]

    def start(model: Path, *flags: str) -> Logged:
        common = ("--model", str(model), "--host", "127.0.0.1", "--port", "0", "--threads", "1")
        lines = []
        with child([*command, *common, "--offline", "-lv", "4", *flags], tmp_path) as process:
            assert process.stderr is not None
            for line in process.stderr:  # until the child exits
                lines.append(line)
                if "listening on" in line:
                    return Logged(read_sizes(lines), lines)
        raise AssertionError("".join(lines[-30:]))

    return start


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a tiny model by its name. Each file is written once."""
    folder = tmp_path_factory.mktemp("architectures")

    def path_of(name: str) -> Path:
        path = folder / f"{name.replace(' ', '-')}.gguf"
        if not path.exists():
            path.write_bytes(tiny_model(name))
        return path

    return path_of


def flags_of(shape: ContextShape) -> list[str]:
    flags = ["--ctx-size", str(shape.ctx_total), "--parallel", str(shape.parallel)]
    flags += ["--ubatch-size", str(shape.ubatch), "--batch-size", "2048"]
    flags += ["--cache-type-k", shape.k_type, "--cache-type-v", shape.v_type]
    flags += ["--flash-attn", "on" if shape.flash_attn else "off"]
    flags += ["--kv-unified" if shape.unified else "--no-kv-unified"]
    return [*flags, "--swa-full"] if shape.swa_full else flags


def check(model: ModelFacts, shape: ContextShape, logged: Logged) -> None:
    caches = logged.count("KV buffer size", "RS buffer size")
    assert kv_bytes(model, shape) == pytest.approx(logged.sizes.kv_bytes, abs=ROUNDING * caches)
    assert logged.sizes.compute_bytes <= compute_bytes(model, shape) <= 2 * logged.sizes.compute_bytes
    assert logged.sizes.complete
    if model.mtp_layers == 0:  # without draft-mtp, llama-server does not load the MTP weights
        assert model.weights_bytes == pytest.approx(logged.sizes.weights_bytes, abs=ROUNDING)


def shape_of(
    ctx_total: int,
    parallel: int,
    ubatch: int = 512,
    *,
    kv_type: str = "f16",
    flash_attn: bool = True,
    unified: bool = False,
    swa_full: bool = False,
) -> ContextShape:
    """A context of a current build, with memory for the logits of one token per slot."""
    return ContextShape(
        ctx_total,
        parallel,
        ubatch,
        k_type=kv_type,
        v_type=kv_type,
        flash_attn=flash_attn,
        unified=unified,
        swa_full=swa_full,
        outputs_per_slot=1,
    )


SHAPES = {
    "four slots": shape_of(8192, 4),
    "sixteen slots that share their cells": shape_of(16384, 16, unified=True),
    "without flash attention": shape_of(4096, 2, flash_attn=False),
    "packed": shape_of(8192, 2, kv_type="q8_0"),
    "sliding layers in full": shape_of(8192, 2, swa_full=True),
    "small micro-batches": shape_of(8192, 2, 64),
    "large micro-batches": shape_of(8192, 1, 2048),
    "a length that is rounded up": shape_of(1000, 3, 192),
}


@pytest.mark.parametrize("architecture", DECODERS)
def test_context_takes_the_estimated_memory_in_every_shape(
    architecture: str, load: Load, files: Callable[[str], Path]
) -> None:
    path = files(architecture)
    model = read_model(path)
    assert model.model_class is ModelClass.DECODER
    for shape in SHAPES.values():
        check(model, shape, load(path, *flags_of(shape)))


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(2048, 1),
        shape_of(8192, 1, 2048),
        shape_of(8192, 4, unified=True),
        shape_of(4096, 1, flash_attn=False),
    ],
    ids=["one slot", "large micro-batches", "slots that share their cells", "without flash attention"],
)
def test_encoder_decoder_with_one_sequence_takes_the_estimated_memory(
    shape: ContextShape, load: Load, files: Callable[[str], Path]
) -> None:
    """Its position bias allows only one sequence: with more, llama-server aborts (b11434)."""
    path = files("t5")
    flags = flags_of(replace(shape, flash_attn=False)) if not shape.flash_attn else flags_of(shape)
    if shape.flash_attn:
        flags[flags.index("--flash-attn") + 1] = "auto"
    check(read_model(path), shape, load(path, *flags))


@pytest.mark.parametrize("parallel", [1, 4])
def test_encoder_takes_the_estimated_memory_without_a_kv_cache(
    parallel: int, load: Load, tmp_path: Path
) -> None:
    path = tmp_path / "bert.gguf"
    path.write_bytes(models.tiny_encoder())
    shape = shape_of(512 * parallel, parallel)
    check(read_model(path), shape, load(path, "--embedding", *flags_of(shape)))


@pytest.mark.parametrize(
    ("architecture", "rollback"), [("glm4moe", 0), ("qwen35", 3)], ids=["attention", "recurrence"]
)
def test_mtp_drafting_takes_its_own_context_and_snapshots(
    architecture: str, rollback: int, load: Load, files: Callable[[str], Path]
) -> None:
    path = files(architecture)
    model = read_model(path)
    shape = replace(shape_of(8192, 2), rollback=rollback, outputs_per_slot=4)
    logged = load(path, *flags_of(shape), "--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
    both = kv_bytes(model, shape) + mtp_kv_bytes(model, shape)
    assert both == pytest.approx(logged.sizes.kv_bytes, abs=ROUNDING * 3)
    assert logged.sizes.compute_bytes <= 2 * compute_bytes(model, shape) <= 4 * logged.sizes.compute_bytes


def test_draft_model_takes_a_context_of_the_size_of_the_target_context(
    load: Load, files: Callable[[str], Path]
) -> None:
    target, draft = files("gemma3"), files("llama")
    shape = shape_of(8192, 2)
    logged = load(target, *flags_of(shape), "--spec-type", "draft-simple", "--spec-draft-model", str(draft))
    facts = (read_model(target), read_model(draft))
    assert sum(kv_bytes(model_facts, shape) for model_facts in facts) == pytest.approx(
        logged.sizes.kv_bytes, abs=3 * ROUNDING
    )
    assert sum(model_facts.weights_bytes for model_facts in facts) == pytest.approx(
        logged.sizes.weights_bytes, abs=2 * ROUNDING
    )


# The widths of real models, with the number of layers of the tiny ones.
WIDE = {
    "llama": Widths(  # Llama 3 8B
        width=4096, heads=32, kv_heads=8, head=128, forward_width=14336, words=127_899
    ),
    "qwen3moe": Widths(  # Qwen3 30B A3B
        width=2048,
        heads=32,
        kv_heads=4,
        head=128,
        expert_count=128,
        experts_used=8,
        expert_width=768,
        words=151_579,
    ),
    "gemma3": Widths(  # Gemma 3 12B
        width=3840, heads=16, kv_heads=8, head=256, forward_width=15360, window=1024, words=261_787
    ),
    "deepseek2": Widths(  # DeepSeek V2, with fewer experts
        width=5120,
        heads=128,
        head=128,
        forward_width=12288,
        expert_count=16,
        experts_used=6,
        expert_width=1536,
        latent_rank=512,
        latent_rope=64,
        words=102_043,
    ),
    "granitehybrid": Widths(  # Granite 4.0 H Small, without its experts
        width=4096,
        heads=32,
        kv_heads=8,
        head=128,
        forward_width=1536,
        inner=8192,
        state=128,
        ssm_heads=128,
        words=99_995,
    ),
    "qwen35": Widths(  # Qwen3.5 9B
        width=4096,
        heads=16,
        kv_heads=4,
        head=256,
        forward_width=12288,
        inner=4096,
        state=128,
        ssm_heads=32,
        groups=16,
        words=247_963,
    ),
}


@pytest.mark.one_runtime
@pytest.mark.parametrize("architecture", WIDE)
def test_models_as_wide_as_real_ones_take_the_estimated_memory(
    architecture: str, load: Load, tmp_path: Path
) -> None:
    path = write_hollow(tmp_path / "wide.gguf", architecture, WIDE[architecture])
    model = read_model(path)
    for shape in (shape_of(4096, 1), shape_of(4096, 4, 128), shape_of(4096, 1, flash_attn=False)):
        check(model, shape, load(path, "--no-warmup", *flags_of(shape)))


def test_embedding_decoder_takes_memory_for_the_logits_of_every_token(load: Load, tmp_path: Path) -> None:
    """Its compute buffers are more than twice as large as those of the same model when it generates."""
    path = write_hollow(tmp_path / "wide.gguf", "llama", WIDE["llama"])
    shape = shape_of(4096, 1)
    embedder = replace(read_model(path), model_class=ModelClass.ENCODER)
    logged = load(path, "--no-warmup", "--embedding", "--pooling", "last", *flags_of(shape))
    check(embedder, shape, logged)
    assert logged.sizes.compute_bytes > 2 * compute_bytes(read_model(path), shape)
