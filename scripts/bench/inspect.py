"""The time to read models: a header with a large vocabulary, and a folder of many models (P8).

Each row has two measurements: the reading in this process, and the whole ``llamasup inspect`` command, which
mostly starts Python and imports modules. Cold: llamasup's cache is empty, but the system caches the files.
Medians over the runs, with their spread.

    python -m scripts.bench inspect [--runs 9] [--models 1000]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from llamasup.core.gguf.files import read_model
from llamasup.core.models.folder import list_models
from llamasup.core.system.hardware.probe import hardware
from llamasup.features.doctor.inspection import fits_here
from scripts.pages import deciles_table
from tests.kit.gguf_writer import TensorPlan, tensor_bytes, write_gguf, write_gguf_header
from tests.kit.tiny import tiny_keys, tiny_tensors

VOCABULARY = 150_000
PROMISED_MS = {
    "vocabulary, cold": 150,
    "vocabulary, cached": 5,
    "folder, cold": 1000,
    "folder, cached": 100,
}


def main(options: argparse.Namespace) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="llamasup-bench-") as name:
        top = Path(name)
        vocabulary, folder, real = top / "vocabulary.gguf", top / "many", top / "real"
        _write_vocabulary(vocabulary)
        _write_folder(folder, options.models)
        _write_real(real, options.models // 50)
        print(f"{options.runs} runs, milliseconds. folder: {options.models} models, 21 tensors, 554 tokens;")
        print(f"real: {options.models // 50} models, 291 tensors, {VOCABULARY:,} tokens\n")
        times: dict[str, list[float]] = {}
        for label, path, read in (
            ("vocabulary", vocabulary, read_model),
            ("folder", folder, _list),
            ("real", real, _list),
        ):
            times |= _measure(label, path, read, top / "cache", options.runs)
    print(deciles_table(times, digits=1), "\n")
    for row, most in PROMISED_MS.items():
        median = statistics.median(times[row])
        print(f"P8, {row}, at most {most} ms: {median:.1f} ms, {'kept' if median <= most else 'MISSED'}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--models", type=int, default=1000)


def _list(folder: Path) -> None:
    machine = hardware()
    for found in list_models(folder).models:
        if isinstance(found.outcome, Exception):
            raise found.outcome
        fits_here(found.outcome, machine)


def _measure(
    label: str, path: Path, read: Callable[[Path], object], cache: Path, runs: int
) -> dict[str, list[float]]:
    """Milliseconds by row."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-m", "llamasup", "inspect", str(path)]
    measured: dict[str, list[float]] = {}
    for what, action in (
        (f"{label}, %s", lambda: read(path)),
        (f"{label}, %s, command", lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)),
    ):
        times: dict[str, list[float]] = {"cold": [], "cached": []}
        for _ in range(runs):
            shutil.rmtree(cache, ignore_errors=True)
            times["cold"].append(_timed(action))
            times["cached"].append(_timed(action))
        measured |= {what % state: values for state, values in times.items()}
    return measured


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


# --- the files -----------------------------------------------------------------------------------


def _write_vocabulary(path: Path) -> None:
    words = [f"w{number:06x}" for number in range(VOCABULARY)]
    keys = tiny_keys(words) | {"tokenizer.ggml.merges": [f"a{number} b" for number in range(VOCABULARY)]}
    path.write_bytes(write_gguf(keys, tiny_tensors(words)))


def _write_folder(folder: Path, count: int) -> None:
    folder.mkdir()
    content = write_gguf(tiny_keys(), tiny_tensors())
    for number in range(count):
        (folder / f"model-{number:04d}.gguf").write_bytes(content)


def _write_real(folder: Path, count: int) -> None:
    """Headers of the size that models of 8 billion parameters have; the weights are holes in the files."""
    folder.mkdir()
    words = [f"w{number:06x}" for number in range(VOCABULARY)]
    keys = tiny_keys(words) | {"llama.block_count": 32}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    norms = ("attn_norm", "ffn_norm")
    plans = [TensorPlan(f"blk.{layer}.{name}.weight", (64, 64)) for layer in range(32) for name in matrices]
    plans += [TensorPlan(f"blk.{layer}.{name}.weight", (64,)) for layer in range(32) for name in norms]
    plans += [TensorPlan(f"{name}.weight", (64,)) for name in ("token_embd", "output_norm", "output")]
    header = write_gguf_header(keys, plans)
    for number in range(count):
        path = folder / f"model-{number:04d}.gguf"
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(map(tensor_bytes, plans)))
