"""The measurements. Each is a function of a Bench that returns what it saw as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from scripts import processes
from scripts.bench import plan as bench_plan
from scripts.gpu import card
from scripts.gpu.models import Models
from scripts.gpu.supervised import Supervised, supervised

__all__ = ["CHECKS", "Bench"]

Result = dict[str, Any]
_SWAPS = 6
_GONE_LIMIT_S = 20.0
_FREED_BYTES = 64 << 20  # less than this is left of a process that ended


@dataclass(frozen=True)
class Bench:
    runtime: str
    folder: Path  # for files of the checks
    models: Models
    rounds: int

    @property
    def run(self) -> tuple[str, ...]:
        return "--port", "0", "--runtime", self.runtime

    @contextmanager
    def running(self, model: Path, *options: str) -> Iterator[Supervised]:
        with supervised("run", str(model), *self.run, *options) as llamasup:
            llamasup.ready()
            yield llamasup

    @contextmanager
    def serving(self, config: str) -> Iterator[Supervised]:
        path = self.folder / "config.yaml"
        path.write_text(f"listen: 127.0.0.1:0\nruntime: {self.runtime}\n{config}")
        with supervised("serve", "--config", str(path)) as llamasup:
            llamasup.ready()
            yield llamasup

    def plan(self, model: Path, *options: str) -> Result:
        return bench_plan.planned(Namespace(runtime=self.runtime), model, *options)


def machine(bench: Bench) -> Result:
    """Report what llamasup finds on this machine."""
    doctor = _output(sys.executable, "-m", "llamasup", "doctor", "--json", "--runtime", bench.runtime)
    return {
        "gpu": _output(
            "nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"
        ).strip(),
        "cpu": processes.machine(),
        "version": _output(bench.runtime, "--version").strip(),
        "devices": _output(bench.runtime, "--list-devices").strip(),
        "doctor": json.loads(doctor) if doctor.startswith("{") else doctor,
    }


def memory(bench: Bench) -> Result:
    """The GPU memory that the plan predicts, and what NVML then shows."""
    rows = []
    variants: tuple[tuple[str, ...], ...]
    variants = (("small",), ("middle",), ("middle", "--kv-type", "q8_0"), ("large", "--parallel", "1"))
    for name, *options in variants:
        model = bench.models.wait_for(name)
        before = card.used_bytes()
        plan = bench.plan(model, *options)
        with bench.running(model, *options) as llamasup:
            llamasup.ask(prompt=512)
            llamasup.crowd(4, prompt=256)
            (server,) = llamasup.servers()
            rows.append(
                {
                    "model": name,
                    "options": " ".join(options),
                    "file_bytes": model.stat().st_size,
                    "predicted": plan["memory"],
                    "argv": plan["argv"],
                    "measured_bytes": card.used_bytes() - before,
                    "measured_by_process_bytes": card.used_by(server.pid),
                    "ready_s": llamasup.events[-1][0],
                }
            )
    return {"rows": rows}


def speed(bench: Bench) -> Result:
    """llamasup's plan and a q8_0 KV cache, each in rounds with llama-server's bare defaults."""
    packed = "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"
    return {name: _compared(bench, name, (packed,)) for name in ("small", "middle")}


def _compared(bench: Bench, name: str, trials: tuple[str, ...]) -> Result:
    options = Namespace(runtime=bench.runtime, contenders=["default"], trials=trials, base="default")
    work = bench_plan.Work(long_prompt=4096, short_prompt=16, client_prompt=256, answer=128)
    field = list(bench_plan.contenders(options, bench.models.wait_for(name), str(bench.folder / "config")))
    rounds = []
    for number in range(bench.rounds):
        turn = number % len(field)
        measured = {
            contender.name: bench_plan.measure(contender, work) for contender in field[turn:] + field[:turn]
        }
        rounds.append({contender.name: measured[contender.name] for contender in field})
    return {"argv": {contender.name: contender.argv for contender in field}, "rounds": rounds}


def warm_up(bench: Bench) -> Result:
    """The first requests of a model that was just loaded, with a warm-up and without one."""
    rows = []
    for number in range(bench.rounds):
        for options in ((), ("--no-warmup",)) if number % 2 else (("--no-warmup",), ()):
            with bench.running(bench.models.wait_for("middle"), *options) as llamasup:
                first, second, third = (llamasup.ask(prompt=256, seed=seed, answer=4) for seed in (1, 2, 3))
                rows.append(
                    {
                        "options": " ".join(options),
                        "ready_s": llamasup.ready(),
                        "first_s": first.first_s,
                        "second_s": second.first_s,
                        "third_s": third.first_s,
                    }
                )
    return {"rows": rows}


def split(bench: Bench) -> Result:
    """A model that does not fit: another program holds memory, and the plan leaves layers on the host."""
    model = bench.models.wait_for("large")
    with card.holding(leave_bytes=int(model.stat().st_size * 0.6)):
        free = card.free_bytes()
        plan = bench.plan(model, "--parallel", "1")
        with bench.running(model, "--parallel", "1") as llamasup:
            answer = llamasup.ask(prompt=256, answer=16)
            used = free - card.free_bytes()
        trials = ("--cache-type-k f16 --cache-type-v f16", "--parallel 1 --ctx-size 4096")
        compared = _compared_once(bench, model, trials)
    return {
        "free_bytes": free,
        "used_bytes": used,
        "predicted": plan["memory"],
        "alternatives": plan["alternatives"],
        "argv": plan["argv"],
        "answer": answer.as_json(),
        "ready_s": llamasup.ready(),
        "speed": compared,
    }


def _compared_once(bench: Bench, model: Path, trials: tuple[str, ...]) -> Result:
    """llama-server's bare defaults, the plan, and changes of the plan. One that fails is named."""
    options = Namespace(runtime=bench.runtime, contenders=["default"], trials=trials, base="default")
    speeds: Result = {}
    for contender in bench_plan.contenders(options, model, str(bench.folder / "config")):
        try:
            with bench_plan.running(contender) as (process, port, began_s):
                bench_plan.wait_until_ready(port, process)
                ready_s = time.monotonic() - began_s
                timings = bench_plan.ask(port, prompt=bench_plan.tokens(256, seed=2), answer=16)
                speeds[contender.name] = timings | {"ready_s": ready_s, "used_bytes": card.used_bytes()}
        except (OSError, SystemExit) as error:
            speeds[contender.name] = {"problem": str(error)}
    return speeds


def out_of_memory(bench: Bench) -> Result:
    """Another program takes the memory between the plan and the load, so that the load fails for real.

    Without --fit, because llama-server would place fewer layers on the GPU.
    """
    model = bench.models.wait_for("middle")
    asks, goes = bench.folder / "asks", bench.folder / "goes"
    for fifo in (asks, goes):
        os.mkfifo(fifo)
    wrapper = bench.folder / "llama-server"
    wrapper.write_text(
        f"""#!/bin/sh
# The first start of a model waits until another program holds the GPU's memory.
case " $* " in
*" --model "*) if mkdir {bench.folder}/started 2>/dev/null; then echo > {asks}; read -r _ < {goes}; fi ;;
esac
exec {bench.runtime} "$@"
"""
    )
    wrapper.chmod(0o755)
    os.environ["LD_LIBRARY_PATH"] = f"{Path(bench.runtime).parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    options = ("--port", "0", "--runtime", str(wrapper), "--", "--fit", "off")
    with supervised("run", str(model), *options) as llamasup:
        asks.read_bytes()
        with card.holding(leave_bytes=int(model.stat().st_size * 1.5)):
            goes.write_text("go\n")
            with contextlib.suppress(RuntimeError):
                llamasup.wait_for(
                    lambda event: event["event"] == "ready" or event.get("state") in ("failed", "stopped"),
                    limit_s=60,
                )
            states = list(llamasup.events)
            answer = llamasup.ask(answer=16).as_json() if _is_ready(llamasup) else None
            argv = [server.cmdline() for server in llamasup.servers()]
    return {"events": states, "answer": answer, "argv": argv}


def _is_ready(llamasup: Supervised) -> bool:
    return any(event["event"] == "ready" for _, event in llamasup.events)


def memory_taken(bench: Bench) -> Result:
    """Another program takes all free memory while a model serves."""
    with bench.running(bench.models.wait_for("small")) as llamasup:
        with card.holding(leave_bytes=0):
            left = card.free_bytes()
            answers, took_s = llamasup.crowd(4, prompt=4000, answer=16)
        after = llamasup.ask()
        return {
            "left_bytes": left,
            "answers": [answer.as_json() for answer in answers],
            "took_s": took_s,
            "after": after.as_json(),
            "events": list(llamasup.events),
        }


def swap(bench: Bench) -> Result:
    """Two models of which the GPU holds one: each request is for the other model."""
    model = bench.models.wait_for("large")
    names = ("one", "other")
    for name in names:
        os.link(model, bench.folder / f"{name}.gguf")
    both = "".join(f"  {name}: {{path: {bench.folder}/{name}.gguf, parallel: 1}}\n" for name in names)
    rows = []
    with (
        card.holding(leave_bytes=int(model.stat().st_size * 1.5)),
        bench.serving(f"models:\n{both}") as llamasup,
    ):
        for number in range(_SWAPS):
            name = names[number % 2]
            began_s = time.monotonic()
            answer = llamasup.ask(model=name, answer=4)
            rows.append(
                {
                    "model": name,
                    "took_s": time.monotonic() - began_s,
                    "servers": len(llamasup.servers()),
                    "argv": [server.cmdline() for server in llamasup.servers()],
                    **answer.as_json(),
                }
            )
        return {"rows": rows, "events": list(llamasup.events)}


def replicas(bench: Bench) -> Result:
    """One process and two processes of a small model on the same GPU, with 8 clients."""
    model = bench.models.wait_for("small")
    rows = []
    for count in (1, 2):
        keys = f"path: {model}, replicas: {count}, ctx_size: 4096, parallel: 4, preload: true"
        before = card.used_bytes()
        with bench.serving(f"models:\n  it: {{{keys}}}\n") as llamasup:
            llamasup.crowd(8, model="it", prompt=256, answer=16)
            answers, took_s = llamasup.crowd(8, model="it", prompt=256, answer=128)
            rows.append(
                {
                    "replicas": count,
                    "servers": len(llamasup.servers()),
                    "tokens_per_s": sum(answer.tokens for answer in answers) / took_s,
                    "problems": [answer.problem for answer in answers if answer.problem],
                    "used_bytes": card.used_bytes() - before,
                }
            )
    return {"rows": rows}


def ends(bench: Bench) -> Result:
    """Kill llamasup and llama-server while a request runs: who is left, and what the GPU still holds."""
    model = bench.models.wait_for("middle")
    rows = []
    for what in ("SIGTERM to llamasup", "SIGKILL to llamasup", "SIGKILL to llama-server"):
        before = card.used_bytes()
        with bench.running(model, "--drain-timeout", "0") as llamasup:
            held = card.used_bytes() - before
            (server,) = llamasup.servers()
            asking = threading.Thread(target=llamasup.ask, kwargs={"answer": 2000})
            asking.start()
            time.sleep(0.5)  # in the middle of the answer
            seen = len(llamasup.events)
            number = signal.SIGTERM if what.startswith("SIGTERM") else signal.SIGKILL
            os.kill(server.pid if what.endswith("llama-server") else llamasup.process.pid, number)
            row: Result = {"what": what, "held_bytes": held}
            if what.endswith("llama-server"):
                began_s = llamasup.events[seen - 1][0]
                ready_s, _ = llamasup.wait_for(lambda event: event.get("state") == "ready", after=seen)
                row |= {"serves_again_s": ready_s - began_s, "answer": llamasup.ask().as_json()}
            else:
                row |= _remains(server, before)
            asking.join()
            rows.append(row)
    return {"rows": rows}


def loading(bench: Bench) -> Result:
    """Loads from the disk and from the file cache: the announced and the real remaining time at half time."""
    rows = []
    for number in range(bench.rounds):
        for name, is_cold in (("middle", True), ("middle", False), ("large", False)):
            model = bench.models.wait_for(name)
            if is_cold:
                _drop_from_cache(model)
            with bench.running(model, "--parallel", "1") as llamasup:
                took_s = llamasup.ready()
                seen = [(at_s, event) for at_s, event in llamasup.events if event["event"] == "progress"]
                half = [(at_s, event) for at_s, event in seen if at_s <= took_s / 2][-1:]
                eta_s = half[0][1]["eta_s"] if half else None
                rows.append(
                    {
                        "model": name,
                        "cold": is_cold,
                        "load": number,
                        "took_s": took_s,
                        "left_s": took_s / 2,
                        "eta_s": None if eta_s is None else eta_s - (took_s / 2 - half[0][0]),
                        "events": seen,
                    }
                )
    return {"rows": rows}


def _drop_from_cache(model: Path) -> None:
    """The next load reads the file from the disk. No effect on a file in memory (tmpfs)."""
    with model.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def usage(bench: Bench) -> Result:
    """The tokens and the energy that `llamasup usage` shows, and what the GPU's own counter shows."""
    with bench.running(bench.models.wait_for("middle")) as llamasup:
        llamasup.ask()
        before_j = card.energy_j()
        began_s = time.monotonic()
        answers, took_s = llamasup.crowd(4, prompt=256, answer=256)
        idle_j = card.energy_j()
    shown = _output(sys.executable, "-m", "llamasup", "usage", "--by", "model", "--json")
    return {
        "usage": json.loads(shown) if shown.startswith("{") else shown,
        "tokens": sum(answer.tokens for answer in answers),
        "took_s": took_s,
        "watched_s": time.monotonic() - began_s,
        "gpu_j": idle_j - before_j,
    }


def _remains(server: psutil.Process, before_bytes: int) -> Result:
    """The time until the process is gone and the GPU's memory is free, and what is still used then."""
    return {
        "process_gone_s": card.wait_until(lambda: not _runs(server), _GONE_LIMIT_S),
        "memory_freed_s": card.wait_until(
            lambda: card.used_bytes() - before_bytes < _FREED_BYTES, _GONE_LIMIT_S
        ),
        "left_bytes": card.used_bytes() - before_bytes,
    }


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _output(*argv: str) -> str:
    """Both streams of a command; the reason if it cannot run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr


CHECKS: Mapping[str, Callable[[Bench], Result]] = MappingProxyType(
    {
        check.__name__.replace("_", "-"): check
        for check in (
            *(machine, ends, memory, out_of_memory, split, swap, speed, warm_up),
            *(memory_taken, replicas, loading, usage),
        )
    }
)
"""In the order in which they run."""
