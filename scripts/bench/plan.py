"""The benefit of a plan: llama-server's bare defaults compared with llamasup's plan and each profile.

Every contender is one command line of the same server: the bare defaults are ``llama-server -m MODEL``, the
others are the output of ``llamasup plan``. There is no proxy. The script starts, measures and stops them one
after another, in an order that rotates with each round. It divides each figure by that of the bare defaults
in the same round, so that a slow minute of the machine affects all of them.

    python -m scripts.bench plan [--rounds 5] [--contenders default latency] [--quick]

Single flags (and variables of the environment) are compared the same way, on top of the bare defaults or of
the plan, also with other programs keeping CPUs busy:

    python -m scripts.bench plan --contenders --try '--threads 1' --try 'OMP_WAIT_POLICY=passive' --busy 1
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.pages import ROOT, spread
from scripts.processes import machine

PROFILES = ("latency", "throughput", "memory", "plain")
BARE = "bare defaults"
START_LIMIT_S = 300
ANSWER_LIMIT_S = 900

# Every figure: its key, its label, and whether a higher value is better.
FIGURES = (
    ("ready_ms", "exec to ready, ms", False),
    ("first_token_ms", "exec to the first real token, ms", False),
    ("prompt_tps", "prompt, tokens/s", True),
    ("generation_tps", "generation, one client, tokens/s", True),
    ("deep_tps", "generation behind the long prompt, tokens/s", True),
    ("cpu_ms_per_token", "CPU time per generated token, ms", False),
    ("served4_tps", "4 clients: generated tokens/s in all", True),
    ("first4_ms", "4 clients: first token, median, ms", False),
    ("worst4_ms", "4 clients: first token, worst, ms", False),
    ("served8_tps", "8 clients: generated tokens/s in all", True),
    ("anon_mb", "memory of its own after all that, MB", False),
    ("pss_mb", "memory with its share of mapped files, MB", False),
    ("peak_mb", "highest resident memory, MB", False),
)


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    argv: tuple[str, ...]  # without an address
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Work:
    """The requests to each contender in a round, in tokens."""

    long_prompt: int
    short_prompt: int
    client_prompt: int
    answer: int


# --- the contenders --------------------------------------------------------------------------------


def planned(args: argparse.Namespace, model: Path, *options: str) -> dict[str, Any]:
    """The output of ``llamasup plan`` with these options."""
    argv = [sys.executable, "-m", "llamasup", "plan", str(model), "--json", *options]
    argv += ["--runtime", args.runtime] if args.runtime else []
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{shlex.join(argv)} ended with {done.returncode}")
    return dict(json.loads(done.stdout))


def contenders(args: argparse.Namespace, model: Path, folder: str) -> Iterator[Contender]:
    default = planned(args, model)
    command = default["argv"][: default["argv"].index("--model")]
    # The bare defaults get the variables of a shell, and the path of the server's libraries.
    bare_env = {
        name: value
        for name, value in default["env"].items()
        if name in os.environ or name.endswith("LIBRARY_PATH") or name == "GGML_NO_BACKTRACE"
    }
    bare = Contender(BARE, (*command, "-m", str(model)), bare_env | {"XDG_CONFIG_HOME": folder})
    yield bare
    base = bare
    for name in args.contenders:
        plan = default if name == "default" else planned(args, model, "--profile", name)
        yield _of_plan(name, plan, folder)
    if args.base == "default":
        base = _of_plan("default", default, folder)
    for words in args.trials:
        flags = shlex.split(words)
        env = dict(base.env)
        while flags and "=" in flags[0] and not flags[0].startswith("-"):
            name, _, value = flags.pop(0).partition("=")
            env[name] = value
        yield Contender(words, (*base.argv, *flags), env)


def _of_plan(name: str, plan: Mapping[str, Any], folder: str) -> Contender:
    """The plan's command line without its address, because each contender gets its own port.

    It also lacks the verbose log that only the first load of a plan has.
    """
    argv = list(plan["argv"])
    for flag in ("--host", "--port", "--api-key-file", "--verbosity"):
        if flag in argv:
            at = argv.index(flag)
            del argv[at : at + 2]
    env = {name: value for name, value in plan["env"].items() if value != "***"}
    return Contender(name, tuple(argv), env | {"XDG_CONFIG_HOME": folder})


@contextlib.contextmanager
def running(contender: Contender) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """The server, its port, and when it was started."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    argv = [*contender.argv, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(contender.env)
        )
        try:
            yield process, port, began
        except OSError:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-2000:])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# --- one round -------------------------------------------------------------------------------------


def measure(contender: Contender, work: Work) -> dict[str, float]:
    with running(contender) as (process, port, began):
        figures: dict[str, float] = {}
        wait_until_ready(port, process)
        figures["ready_ms"] = (time.monotonic() - began) * 1e3
        ask(port, prompt=tokens(8, seed=1), answer=1)
        figures["first_token_ms"] = (time.monotonic() - began) * 1e3

        long = ask(port, prompt=tokens(work.long_prompt, seed=2), answer=work.answer // 2)
        figures["prompt_tps"] = long["prompt_per_second"]
        figures["deep_tps"] = long["predicted_per_second"]

        cpu_before = cpu_s(process.pid)
        alone = ask(port, prompt=tokens(work.short_prompt, seed=3), answer=work.answer)
        figures["generation_tps"] = alone["predicted_per_second"]
        figures["cpu_ms_per_token"] = (cpu_s(process.pid) - cpu_before) / work.answer * 1e3

        for count in (4, 8):
            served_tps, first_s = crowd(port, work, count)
            figures[f"served{count}_tps"] = served_tps
            if count == 4:
                figures["first4_ms"] = statistics.median(first_s) * 1e3
                figures["worst4_ms"] = max(first_s) * 1e3
        return figures | memory(process.pid)


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of exactly ``count`` tokens. Prompts of different seeds share no prefix, so none is cached."""
    return [256 + (seed * 31 + index * 7) % 90 for index in range(count)]


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            ready = connection.getresponse().status == 200
            connection.close()
            if ready:
                return
        time.sleep(0.005)
    raise ConnectionError(f"{shlex.join(map(str, process.args))} did not become ready")  # type: ignore[arg-type]


def _post(port: int, prompt: list[int], answer: int, *, stream: bool) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
    body = {
        "prompt": prompt,
        "n_predict": answer,
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": False,
        "stream": stream,
    }
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"/completion answered {response.status}: {response.read(500)!r}")
    return response


def ask(port: int, *, prompt: list[int], answer: int) -> dict[str, float]:
    """The server's own timings of one request."""
    with _post(port, prompt, answer, stream=False) as response:
        return dict(json.load(response)["timings"])


def crowd(port: int, work: Work, count: int) -> tuple[float, list[float]]:
    """Tokens/s of ``count`` clients that start together, and their times to the first token."""
    first_s: list[float] = []
    together = threading.Barrier(count + 1)

    def client(number: int) -> None:
        prompt = tokens(work.client_prompt, seed=10 + count + number)
        together.wait()
        began = time.monotonic()
        with _post(port, prompt, work.answer, stream=True) as response:
            response.readline()
            first_s.append(time.monotonic() - began)
            response.read()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    together.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    if len(first_s) != count:
        raise SystemExit(f"{count - len(first_s)} of {count} clients got no answer")
    return count * work.answer / (time.monotonic() - began), first_s


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, float]:
    """Private memory (without mapped weights), memory with the share of mapped files, and peak memory."""
    kib = {}
    for name in ("status", "smaps_rollup"):
        for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith("kB"):
                kib[key] = int(value.split()[0])
    return {
        "anon_mb": kib["RssAnon"] * 1024 / 1e6,
        "pss_mb": kib["Pss"] * 1024 / 1e6,
        "peak_mb": kib["VmHWM"] * 1024 / 1e6,
    }


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Other programs that never stop computing."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


# --- results ---------------------------------------------------------------------------------------


def ratios(rounds: list[dict[str, dict[str, float]]], name: str, figure: str) -> list[float]:
    """A contender's figure divided by that of the bare defaults, for each round."""
    return [one_round[name][figure] / one_round[BARE][figure] for one_round in rounds]


def table(rounds: list[dict[str, dict[str, float]]], figures: Collection[str] | None = None) -> str:
    """The figures of all contenders, as Markdown. ``figures`` are the keys of the rows; by default all."""
    names = list(rounds[0])
    lines = [
        f"| | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
    ]
    for figure, label, more_is_better in FIGURES:
        if figures is not None and figure not in figures:
            continue
        bare = statistics.median(one_round[BARE][figure] for one_round in rounds)
        cells = [f"{bare:,.0f}" if bare >= 100 else f"{bare:.1f}"]
        cells += [spread(ratios(rounds, name, figure)) for name in names[1:]]
        lines.append(f"| {label} {'↑' if more_is_better else '↓'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def model_file(args: argparse.Namespace, folder: str) -> Path:
    """The given model, or one with random weights, which have the speed and memory of trained ones."""
    if args.model is not None:
        return Path(args.model).resolve()
    from tests.kit.models import write_large_decoder

    model = write_large_decoder(Path(folder, "large.gguf"), args.size_mb * 1_000_000)
    if args.quantize is None:
        return model
    plan = planned(args, model)
    quantize = shutil.which("llama-quantize", path=str(Path(plan["argv"][0]).parent))
    if quantize is None:
        raise SystemExit("--quantize needs llama-quantize beside llama-server")
    smaller = Path(folder, f"large-{args.quantize.lower()}.gguf")
    argv = [quantize, "--allow-requantize", str(model), str(smaller), args.quantize]
    subprocess.run(argv, check=True, env=plan["env"], capture_output=True)
    model.unlink()
    return smaller


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", help="as in llamasup")
    parser.add_argument("--model", metavar="FILE", help="the model file; default: a generated one")
    parser.add_argument("--size-mb", type=int, default=600, help="size of the generated model (q8_0)")
    parser.add_argument(
        "--quantize", metavar="TYPE", help="quantize the generated model with llama-quantize, such as Q4_K_M"
    )
    parser.add_argument("--rounds", type=int, default=5)
    names = ["default", *PROFILES]
    parser.add_argument("--contenders", nargs="*", default=names, choices=names, metavar="NAME")
    parser.add_argument(
        "--try",
        action="append",
        default=[],
        dest="trials",
        metavar="'[NAME=VALUE …] FLAGS'",
        help="flags and variables to compare, on top of --base",
    )
    parser.add_argument(
        "--base", choices=("bare", "default"), default="bare", help="the contender to which --try adds"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="number of other programs that each keep a CPU busy"
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--quick", action="store_true", help="one short round, to test the script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def main(args: argparse.Namespace) -> None:
    if args.quick:
        args.rounds, args.prompt, args.answer = 1, 128, 8
    work = Work(args.prompt, short_prompt=16, client_prompt=max(16, args.prompt // 8), answer=args.answer)
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder, busy(args.busy):
        model = model_file(args, folder)
        config_home = str(Path(folder, "config"))
        field = list(contenders(args, model, config_home))
        for number in range(args.rounds):
            turned = field[number % len(field) :] + field[: number % len(field)]
            measured = {}
            for contender in turned:
                measured[contender.name] = measure(contender, work)
                print(f"round {number + 1}: {contender.name}", file=sys.stderr)
            rounds.append({contender.name: measured[contender.name] for contender in field})
            if args.json:  # after each round, in case the script is interrupted
                lines = {contender.name: shlex.join(contender.argv) for contender in field}
                args.json.write_text(json.dumps({"argv": lines, "rounds": rounds}, indent=1))
        size_mb = model.stat().st_size / 1e6

    about = (
        f"{machine()}; a model of {size_mb:,.0f} MB; {len(rounds)} rounds; prompts of {work.long_prompt} "
        f"tokens ({work.client_prompt} with several clients), answers of {work.answer}"
        + (f"; {args.busy} CPUs kept busy by others" if args.busy else "")
        + f". First column: absolute; the others as ratios to it{', with the spread' * (args.rounds > 1)}."
    )
    text = f"{about}\n\n{table(rounds)}"
    print(text)
