"""Thousands of requests against the residency policy, plain policies and hindsight.

python -m scripts.simulate residency    a minute
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.pool.cheapest_set import UNUSED
from llamasup.core.pool.eviction_policy import (
    Action,
    Evict,
    Load,
    ModelSnapshot,
    Phase,
    ResidencyPolicy,
    Snapshot,
    decide,
)
from tests.kit.residency_sim import Call, Simulation, simulate
from tests.kit.residency_world import Decide, Model, ModelWorld

DEVICE = "CUDA0"
SEEDS, REQUESTS = 5, 3000

# GB of memory with 8,192 tokens of context and 4-bit weights: typical models for such machines
SIZES_GB = {
    "nomic-embed": 0.2, "bge-reranker": 0.7, "qwen2.5-0.5b": 0.7, "llama-3.2-1b": 1.2, "llama-3.2-3b": 2.9,
    "phi-3.5-mini": 3.6, "qwen2.5-7b": 5.3, "mistral-7b": 5.4, "llama-3.1-8b": 6.0, "gemma-2-9b": 8.0,
    "qwen2.5-14b": 10.8, "mistral-small-24b": 15.9, "gemma-2-27b": 18.6, "qwen2.5-32b": 22.0,
}  # fmt: skip
LOAD_BASE_S, LOAD_GB_PER_S = 0.5, 1.5  # a process's start, and a good disk


class Workload(Struct, frozen=True):
    """One client after the other. ``stay``: how likely the next request is for the same model again.
    ``zipf``: how much more popular the first is; every 400 requests two change their ranks.
    """

    title: str
    sizes_gb: dict[str, float]
    budget_gb: float
    zipf: float = 0.9
    stay: float = 0.7

    def models(self) -> list[Model]:
        return [
            Model(
                id=id_,
                needs={DEVICE: round(size * 1e9)},
                load_s=LOAD_BASE_S + size / LOAD_GB_PER_S,
                unload_s=0.2,
            )
            for id_, size in self.sizes_gb.items()
        ]

    def calls(self, seed: int, count: int) -> list[Call]:
        """Answers take 2 s; a next question comes after 20 s, another matter after 80 s, on average."""
        chance = random.Random(seed)
        ranked = chance.sample(sorted(self.sizes_gb), len(self.sizes_gb))
        weights = [1 / (rank + 1) ** self.zipf for rank in range(len(ranked))]
        calls: list[Call] = []
        for nth in range(count):
            if nth % 400 == 399:
                one, other = chance.sample(range(len(ranked)), 2)
                ranked[one], ranked[other] = ranked[other], ranked[one]
            if calls and chance.random() < self.stay:
                calls.append(Call(calls[-1].model, 2.0, chance.expovariate(1 / 20)))
            else:
                calls.append(Call(chance.choices(ranked, weights)[0], 2.0, chance.expovariate(1 / 80)))
        return calls


WORKLOADS = (
    Workload("14 models, 24 GB, conversations", SIZES_GB, 24),
    Workload("14 models, 48 GB, conversations", SIZES_GB, 48),
    Workload("14 models, 48 GB, single requests", SIZES_GB, 48, stay=0.2),
    Workload("14 equal models of 6 GB, 24 GB, conversations", dict.fromkeys(SIZES_GB, 6.0), 24),
)


class Future:
    """The knowledge of hindsight: the number of requests until the next use of each model."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.at: dict[str, list[int]] = {}
        for nth, call in enumerate(calls):
            self.at.setdefault(call.model, []).append(nth)
        self.simulation: Simulation | None = None

    def until_next(self, id_: str) -> float:
        assert self.simulation is not None
        now = self.simulation.issued
        later = self.at.get(id_, [])
        nth = bisect_left(later, now)
        return later[nth] - now if nth < len(later) else float("inf")


def one_by_one(first: Callable[[ModelSnapshot], tuple[float, ...]]) -> Decide:
    """A usual cache policy: evict idle models in this order until the new one fits."""

    def decided(snapshot: Snapshot) -> tuple[Action, ...]:
        return tuple(_one_by_one(snapshot, first))

    return decided


def _one_by_one(snapshot: Snapshot, first: Callable[[ModelSnapshot], tuple[float, ...]]) -> Iterator[Action]:
    models = snapshot.models.values()
    waiting = [model for model in models if model.phase is Phase.ABSENT and model.waiting]
    if not waiting:
        return
    model = min(waiting, key=lambda model: model.waiting_since_s)
    holding = [model for model in models if model.phase not in (Phase.ABSENT, Phase.FAILED)]
    lack = model.needs[DEVICE] - snapshot.budget[DEVICE] + sum(model.needs[DEVICE] for model in holding)
    if lack <= 0:
        yield Load(model.id)
        return
    lack -= sum(model.needs[DEVICE] for model in holding if model.phase is Phase.UNLOADING)
    idle = [
        model for model in holding if model.phase is Phase.RESIDENT and not model.in_flight + model.waiting
    ]
    for victim in sorted(idle, key=first):
        if lack <= 0:
            return
        yield Evict(victim.id, "memory", model.id)
        lack -= victim.needs[DEVICE]


def without_counts(snapshot: Snapshot) -> tuple[Action, ...]:
    models = {id_: replace(model, use=UNUSED) for id_, model in snapshot.models.items()}
    return decide(replace(snapshot, models=models))


def played(workload: Workload, calls: list[Call]) -> dict[str, tuple[float, float]]:
    """Hit rate and load seconds of every policy."""
    future = Future(calls)
    models = workload.models()
    uses = dict.fromkeys(workload.sizes_gb, 0)
    last_issued = -1

    def least_often(model: ModelSnapshot) -> tuple[float, ...]:
        nonlocal last_issued
        assert future.simulation is not None
        for call in calls[last_issued + 1 : future.simulation.issued]:
            uses[call.model] += 1
        last_issued = future.simulation.issued - 1
        return uses[model.id], model.used_s

    def knowing(snapshot: Snapshot) -> tuple[Action, ...]:
        """llamasup's policy, with the time to the next use in place of the time since the last use."""
        models = {
            id_: replace(model, use=UNUSED, used_s=snapshot.now_s - min(future.until_next(id_) + 1, 1e9))
            for id_, model in snapshot.models.items()
        }
        return decide(replace(snapshot, models=models, policy=replace(snapshot.policy, idle_grace=0.0)))

    policies: dict[str, Decide] = {
        "least recently used (LRU)": one_by_one(lambda model: (model.used_s,)),
        "least frequently used (LFU)": one_by_one(least_often),
        "llamasup without counts of use": without_counts,
        "**llamasup**": decide,
        "hindsight: farthest in future": one_by_one(lambda model: (-future.until_next(model.id),)),
        "hindsight: llamasup, knowing the next use": knowing,
    }
    results: dict[str, tuple[float, float]] = {}
    for name, policy in policies.items():
        world = ModelWorld(models, {DEVICE: round(workload.budget_gb * 1e9)}, decide=policy)
        future.simulation = Simulation(world, [calls])
        outcome = future.simulation.run()
        assert outcome.answered == len(calls)
        results[name] = outcome.hit_rate, outcome.load_s
    results["bound: no policy does better"] = bounds(workload, calls)
    return results


def bounds(workload: Workload, calls: Sequence[Call]) -> tuple[float, float]:
    """The maximum hit rate and the minimum load seconds of any policy that knows all requests."""
    models = {model.id: model for model in workload.models()}
    budget = workload.budget_gb * 1e9
    loads = least_loss(calls, models, budget, lambda model: 1.0)
    return 1 - loads / len(calls), least_loss(calls, models, budget, lambda model: model.load_s)


def least_loss(
    calls: Sequence[Call], models: dict[str, Model], budget: float, price: Callable[[Model], float]
) -> float:
    """A lower bound of the cost of loads: linear programming relaxation, by its dual.

    A model, or a part of it, is kept from one of its requests to the next, or loaded again. The kept models
    and the requested model must fit together. Any price per byte at each request gives a bound. The loop
    raises the price step by step where too much is kept.
    """
    last: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for nth, call in enumerate(calls):
        if call.model in last:
            spans.append((last[call.model], nth))
        last[call.model] = nth
    total = sum(price(models[call.model]) for call in calls)
    begin, end = np.array(spans).T
    size = np.array([models[calls[at].model].needs[DEVICE] / budget for at in begin])
    worth = np.array([price(models[calls[at].model]) for at in begin])
    room = 1 - np.array([models[call.model].needs[DEVICE] / budget for call in calls])
    byte_price = np.zeros(len(calls))
    saved = float("inf")
    for step in range(4000):
        summed = np.concatenate(([0.0], np.cumsum(byte_price)))
        gain = worth - size * (summed[end] - summed[begin + 1])  # the requests strictly between
        saved = min(saved, float(byte_price @ room + gain[gain > 0].sum()))
        kept = np.zeros(len(calls) + 1)
        taken = np.where(gain > 0, size, 0.0)
        np.add.at(kept, begin + 1, taken)
        np.add.at(kept, end, -taken)
        too_much = np.cumsum(kept)[:-1] - room
        byte_price = np.maximum(0.0, byte_price + 0.5 * float(worth.mean()) / (1 + step / 20) * too_much)
    return total - saved


def policies_table(workload: Workload, *, seeds: int, requests: int) -> str:
    runs = [played(workload, workload.calls(seed, requests)) for seed in range(seeds)]
    mean = {
        name: (fmean(run[name][0] for run in runs), fmean(run[name][1] for run in runs)) for name in runs[0]
    }
    plain_s = next(iter(mean.values()))[1]
    rows = [f"| {workload.title} | hit rate | load seconds | of LRU's |", "|---|---|---|---|"]
    rows += [
        f"| {name} | {hit_rate:.1%} | {load_s:,.0f} | {load_s / plain_s:.1%} |"
        for name, (hit_rate, load_s) in mean.items()
    ]
    return "\n".join(rows)


def busy(seed: int, *, clients: int, requests: int) -> list[list[Call]]:
    """Programs: pauses of at most 50 ms, and nine of ten requests for the client's own model."""
    chance = random.Random(seed)
    names = ["qwen2.5-7b", "mistral-7b", "llama-3.1-8b", "qwen2.5-14b"]
    return [
        [
            Call(
                names[client % 4] if chance.random() < 0.9 else chance.choice(names),
                chance.uniform(0.3, 3.0),
                chance.uniform(0.0, 0.05),
            )
            for _ in range(requests)
        ]
        for client in range(clients)
    ]


def turns_table(*, seeds: int, requests: int) -> str:
    """Memory for two of four models with constant demand for all of them."""
    models = [replace(model, slots=4) for model in WORKLOADS[0].models()]
    variants: dict[str, tuple[ResidencyPolicy, Decide]] = {
        "LRU among idle ones, no turns": (ResidencyPolicy(), one_by_one(lambda model: (model.used_s,))),
        "no idle grace (`idle_grace` 0)": (ResidencyPolicy(idle_grace=0.0), decide),
        "**llamasup** (`time_slice_s` 5, `idle_grace` 0.1)": (ResidencyPolicy(), decide),
        "`idle_grace` 0.3": (ResidencyPolicy(idle_grace=0.3), decide),
        "`time_slice_s` 1": (ResidencyPolicy(time_slice_s=1.0), decide),
        "`time_slice_s` 20": (ResidencyPolicy(time_slice_s=20.0), decide),
    }
    rows = []
    for clients in (4, 8):
        rows += [
            f"| {clients} clients without pauses, room for two of four models "
            "| requests/s | loads in 100 requests | mean wait | longest wait |",
            "|---|---|---|---|---|",
        ]
        for name, (policy, variant) in variants.items():
            programs = [busy(seed, clients=clients, requests=requests) for seed in range(seeds)]
            runs = [simulate(models, program, {DEVICE: 17 * 10**9}, policy, variant) for program in programs]
            answered = sum(run.answered for run in runs)
            rows.append(
                f"| {name} | {answered / sum(run.ended_s for run in runs):.2f} "
                f"| {100 * sum(sum(run.loads.values()) for run in runs) / answered:.1f} "
                f"| {fmean(wait for run in runs for wait in run.waits_s):.1f} s "
                f"| {max(wait for run in runs for wait in run.waits_s):.0f} s |"
            )
        rows.append("")
    return "\n".join(rows).rstrip()


def text(*, seeds: int, requests: int) -> str:
    tables = [policies_table(workload, seeds=seeds, requests=requests) for workload in WORKLOADS]
    return "\n\n".join([*tables, turns_table(seeds=seeds, requests=requests // 10)])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--requests", type=int, default=REQUESTS)


def main(options: argparse.Namespace) -> int:
    print(text(seeds=options.seeds, requests=options.requests))
    return 0
