"""Measure what ``llamasup tune`` finds, and how often it is wrong, on generated models.

    python -m scripts.bench tune [--minutes 1] [--same 20] [--quick]

Four parts. *Models*: each is tuned for some minutes; a result is a proven change, or none. *Same*: the proof
of a candidate that changes nothing, without a screening, so each of the tunings that takes it is wrong.
*Planted*: the build is slow with the plan's own flag, which the tuning has to find. *Busy*: planted and same
again, while another program keeps one core busy at random. All results of llamasup go into a temporary state
folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamasup.core.llama_server.inspect import find_runtime
from llamasup.core.planning.facts import prepare
from llamasup.core.planning.measured.paired import MIN_PAIRS
from llamasup.core.planning.measured.tuned import Changes
from llamasup.core.settings.model import Settings
from llamasup.errors import LlamasupError, TuningFailed
from llamasup.features.tuning.candidates import Candidate, Setup
from llamasup.features.tuning.report import SessionResult, picture, report_as_json
from llamasup.features.tuning.search import Search, begin_proof, proven, result, trials
from llamasup.features.tuning.session import Options, new_search
from llamasup.features.tuning.tune import tune
from scripts.processes import machine
from tests.kit.architectures import tiny_model
from tests.kit.models import tiny_encoder, write_large_decoder
from tests.kit.tiny import tiny_decoder

_BUSY = """
import random, time
while True:
    end = time.monotonic() + random.random()
    while time.monotonic() < end:
        pass
    time.sleep(random.random())
"""
# With this build, the micro-batch of the plan reads prompts token by token.
_SLOW = 'case " $* " in *" --ubatch-size 512 "*) set -- "$@" --ubatch-size 1;; esac'


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    write: Callable[[Path], object]


def _tiny(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(tiny_model(name))


MODELS = (
    Model("dense, F32, 0.7 MB", lambda path: path.write_bytes(tiny_decoder())),
    Model("dense, Q8_0, 50 MB", lambda path: write_large_decoder(path, 50_000_000)),
    Model("dense, Q4_0, 50 MB", lambda path: write_large_decoder(path, 50_000_000, quantization="Q4_0")),
    Model("dense, Q8_0, 200 MB", lambda path: write_large_decoder(path, 200_000_000)),
    Model("mixture of experts, F32", _tiny("qwen3moe")),
    Model("sliding window, F32", _tiny("gemma3")),
    Model("recurrent, F32 (Mamba 2)", _tiny("mamba2")),
    Model("recurrent and attention, F32 (LFM2)", _tiny("lfm2")),
    Model("encoder, F32 (BERT)", lambda path: path.write_bytes(tiny_encoder())),
)

SAME = Candidate("same", Changes((("--sse-ping-interval", "30"),)), "the default of llama-server")


def run(
    model: Path,
    runtime: str,
    minutes: float,
    search_of: Callable[[Setup], Search] = new_search,
) -> SessionResult:
    """One tuning from the beginning, in a state folder of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-tune-") as state:
        os.environ["XDG_STATE_HOME"] = state
        launch = prepare(str(model), Settings(), runtime=runtime, environ=os.environ)
        found = tune(launch, Options("latency", minutes, runtime), say=_say, search_of=search_of)
        assert found is not None
        return found


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another program that computes for up to a second, sleeps for up to a second, and so on."""
    spinner = subprocess.Popen([sys.executable, "-c", _BUSY])
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


def slow_build(folder: Path, runtime: str) -> str:
    """A build that is slow with the plan's own micro-batch."""
    found = find_runtime(runtime, os.environ)
    path = folder / "llama-server"
    libraries = shlex.quote(str(Path(found.path).parent))
    path.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH={libraries}\n{_SLOW}\nexec {shlex.join(found.command)} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


# --- the parts -------------------------------------------------------------------------------------


def tuned_models(models: Sequence[Model], folder: Path, args: argparse.Namespace) -> list[str]:
    rows, gains = [], []
    for number, model in enumerate(models):
        path = folder / f"{number}.gguf"
        model.write(path)
        print(model.name, file=sys.stderr)
        try:
            found = run(path, args.runtime, args.minutes)
        except LlamasupError as error:
            rows.append(f"| {model.name} | {error.message} | | | |")
            continue
        args.results[model.name] = report_as_json(found, model=model.name, purpose="latency", profile=None)
        proof = result(found.search)
        count = trials(found.search)
        if proof is None:
            gains.append(1.0)
            taken = "nothing" if found.finished else "nothing (no verdict in this time)"
            rows.append(f"| {model.name} | {taken} | 1.00 | (the default) | {count} |")
        else:
            seen = proven(proof)
            gains.append(seen.gain)
            bounds = f"{seen.lower:.2f} to {seen.upper:.2f}"
            rows.append(f"| {model.name} | `{proof.candidate.name}` | {seen.gain:.2f} | {bounds} | {count} |")
        path.unlink()
    spread = "none was measured"  # in this time
    if gains:
        spread = f"median gain {statistics.median(gains):.2f}, from {min(gains):.2f} to {max(gains):.2f}"
    head = ["| Model | Taken | Gain, × | 95 % | Pairs and rounds |", "|---|---|---:|---:|---:|"]
    return [f"{len(models)} models, {args.minutes:g} min each: {spread}.", "", *head, *rows]


def same_configurations(model: Path, args: argparse.Namespace, count: int) -> str:
    proofs = wins = 0
    for number in range(count):
        print(f"same, {number + 1} of {count}", file=sys.stderr)
        try:
            found = run(model, args.runtime, args.same_minutes, lambda _setup: begin_proof(SAME))
        except TuningFailed as error:  # no time for one comparison
            print(error, file=sys.stderr)
            continue
        # With fewer rounds it can take nothing, so it would be no evidence.
        proofs += found.finished and len(found.search.proofs[0].ratios) >= MIN_PAIRS
        wins += result(found.search) is not None
    return (
        f"{proofs} of {count} tunings of a candidate that changes nothing finished a proof; {wins} took it."
    )


def planted_flag(model: Path, folder: Path, args: argparse.Namespace) -> str:
    planted = "A build that reads prompts token by token with the plan's `--ubatch-size 512`"
    try:
        found = run(model, slow_build(folder, args.runtime), args.minutes)
    except TuningFailed as error:
        return f"{planted}: {error.message}"
    if args.picture:
        args.picture.write_text(picture(found.search, "A build with a slow micro-batch of 512"))
        args.picture = None  # of the first one
    proof = result(found.search)
    if proof is None:
        why = "not found" if found.finished else f"no verdict in {args.minutes:g} min"
        return f"{planted}: {why}."
    seen = proven(proof)
    bounds = f"95 % {seen.lower:.2f} to {seen.upper:.2f}"
    return f"{planted}: found `{proof.candidate.name}`, {seen.gain:.2f} × ({bounds})."


def _item(text: str) -> str:
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", default="auto", help="as in llamasup")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each model")
    parser.add_argument("--same", type=int, default=20, help="tunings of candidates that change nothing")
    parser.add_argument("--same-minutes", type=float, default=3.0, help="for each of those")
    parser.add_argument("--busy-same", type=int, default=5, help="the same with one busy core")
    parser.add_argument("--quick", action="store_true", help="a short run, to test the script")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="write a picture of the tuning with the planted flag"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")


def main(args: argparse.Namespace) -> None:
    args.results = {}
    if args.quick:
        args.minutes, args.same, args.same_minutes, args.busy_same = 0.02, 1, 0.02, 0
    with tempfile.TemporaryDirectory(prefix="bench-tune-") as name:
        folder = Path(name)
        demo = folder / "demo.gguf"
        demo.write_bytes(tiny_decoder())
        lines = [f"{machine()}.", ""]
        lines += tuned_models(MODELS[:1] if args.quick else MODELS, folder, args)
        lines += ["", _item(planted_flag(demo, folder, args))]
        lines += [_item(same_configurations(demo, args, args.same))]
        if args.busy_same:
            with busy_core():
                lines += [
                    _item(f"While another program keeps a core busy: {planted_flag(demo, folder, args)}")
                ]
                lines += [_item(f"The same: {same_configurations(demo, args, args.busy_same)}")]
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps(args.results, indent=1))
