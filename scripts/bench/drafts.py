"""The gain of speculative decoding with the trained demo model and its draft, by the length of the drafts.

    python -m scripts.bench drafts [--runtime embedded] [--rounds 7] [--lengths 1,2,4,8,16]

All servers run at the same time, and one answers after the other: each round asks each of them for the same
stories at temperature 0. The speed is that in llama-server's timings; gains are medians over the rounds.

A token of the demo model takes only a few times as long as one of its draft: most of the time is that of
starting a computation. Models in use are larger. So the demo model is also measured with wider feed-forward
layers: the answers are the same, and it takes as long as a model of 15 million parameters in F32.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import gguf

import llamasup
from llamasup.core.planning.facts import demo_draft, demo_model
from scripts.demo.stories import ANIMALS
from scripts.pages import spread
from tests.kit.gguf_writer import TensorPlan, write_gguf

WIDER = 8
STORIES = 6  # of each server in each round


class Spoken(NamedTuple):
    """The answers of one server in one round, together."""

    tokens: int
    seconds: float
    proposed: int
    accepted: int


def widened(model: Path, times: int) -> bytes:
    """The same function in more work: each neuron of a feed-forward layer ``times`` times, with a part of its
    weight. In F32.
    """
    reader = gguf.GGUFReader(model)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys |= {"general.file_type": 0}
    keys["llama.feed_forward_length"] *= times
    tensors = []
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".ffn_gate." in tensor.name or ".ffn_up." in tensor.name:
            weights = weights.repeat(times, axis=0)
        elif ".ffn_down." in tensor.name:
            weights = weights.repeat(times, axis=1) / times
        tensors.append((TensorPlan(tensor.name, weights.shape[::-1]), weights.tobytes()))
    return write_gguf(keys, tensors)


def speak(server: llamasup.Server, questions: list[str]) -> Spoken:
    tokens, seconds, proposed, accepted = 0, 0.0, 0, 0
    for question in questions:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "cache_prompt": False}
        answer = server.client.post("/v1/chat/completions", json=body, timeout=60)
        timings = answer.raise_for_status().json()["timings"]
        tokens += timings["predicted_n"]
        seconds += timings["predicted_ms"] / 1000
        proposed += timings.get("draft_n", 0)
        accepted += timings.get("draft_n_accepted", 0)
    return Spoken(tokens, seconds, proposed, accepted)


def measure(model: Path, draft: Path, args: argparse.Namespace) -> Mapping[int, list[Spoken]]:
    """For each length of the drafts, 0 for none: one entry a round."""
    lengths = [0, *args.lengths]
    found: dict[int, list[Spoken]] = {length: [] for length in lengths}
    rng = random.Random(1)
    with ExitStack() as opened:
        servers = {}
        for length in lengths:
            options: dict[str, Any] = {"runtime": args.runtime, "ctx_size": 512, "parallel": 1}
            if length:
                options |= {"draft_model": str(draft), "extra": ("--spec-draft-n-max", str(length))}
            servers[length] = opened.enter_context(llamasup.serve(str(model), **options))
        for number in range(args.rounds + 1):
            questions = [f"Tell me a story about a {rng.choice(ANIMALS)}." for _ in range(STORIES)]
            for length in rng.sample(lengths, len(lengths)):
                spoken = speak(servers[length], questions)
                if number:  # the first round warms up
                    found[length].append(spoken)
            print(f"  round {number} of {args.rounds}", file=sys.stderr)
    return found


def rows(name: str, found: Mapping[int, list[Spoken]]) -> list[str]:
    lines = []
    for length, spoken in found.items():
        gains = [
            (one.tokens / one.seconds) / (base.tokens / base.seconds)
            for one, base in zip(spoken, found[0], strict=True)
        ]
        speed = median(one.tokens / one.seconds for one in spoken)
        proposed = sum(one.proposed for one in spoken)
        share = f"{sum(one.accepted for one in spoken) / proposed:.0%}" if proposed else ""
        lines.append(f"| {name} | {length or 'none'} | {share} | {speed:,.0f} | {spread(gains)} |")
    return lines


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", action="append", help="as in llamasup; both by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")])


def main(args: argparse.Namespace) -> None:
    args.lengths = args.lengths or [1, 2, 4, 8, 16]
    lines = ["| Runtime, model | Draft length | Accepted | Tokens/s | Gain, × (range) |"]
    lines += ["|---|---:|---:|---:|---:|"]
    with tempfile.TemporaryDirectory(prefix="bench-drafts-") as name:
        small, large, draft = (Path(name) / f"{part}.gguf" for part in ("demo", "wide", "draft"))
        small.write_bytes(demo_model())
        large.write_bytes(widened(small, WIDER))
        draft.write_bytes(demo_draft())
        for runtime in args.runtime or ["auto", "embedded"]:
            args.runtime = runtime
            for model, kind in ((large, "widened"), (small, "demo")):
                label = f"{'llama-server' if runtime == 'auto' else runtime}, {kind}"
                print(label, file=sys.stderr)
                lines += rows(label, measure(model, draft, args))
    print("\n".join(lines))
