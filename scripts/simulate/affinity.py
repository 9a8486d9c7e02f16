"""Plays conversations against the choice of a replica, with and without affinity.

python -m scripts.simulate affinity    a minute

What it shows, on all machines: with the least busy replica alone, first tokens take 1.3 to 3.2 times as long.
A limit of half of the permits is the best or close to it. Affinity without a limit is much worse on a slow
machine with few clients: all conversations share the system prompt, so all go to the replica that received it
first. If most requests wait, a queue that is served in order loses most of the gain.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from llamasup.core.pool.replicas.affinity import MAX_BUSIER, Candidate, PromptMarks, choose, homes
from llamasup.core.pool.replicas.conversation import Conversation
from llamasup.core.queueing.queue_order import FairQueue, Queued

SLOTS = 4
KEPT = 12  # conversations in the caches of one process: four in slots, eight in host memory
BATCH = 2048  # while it reads a prompt, the others get one token for so many of it (b11434)
SYSTEM = 1000  # tokens that all conversations begin with
THINK_S = 15.0
TURNS = 8
NONE, ALWAYS = -1.0, 9.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Tokens/s of prompts and of a single answer. ``shared``: the slowdown by each concurrent answer."""

    name: str
    prompt: float
    answer: float
    shared: float
    clients: tuple[int, int, int]
    """The numbers of clients that load two processes partly, fully, and so that requests always wait."""


MACHINES = (
    Machine("GPU", 3000.0, 80.0, 0.1, (12, 22, 28)),
    Machine("laptop", 400.0, 30.0, 0.25, (7, 12, 16)),
    Machine("CPU", 100.0, 10.0, 0.4, (4, 7, 12)),
)


@dataclass(slots=True)
class Talk:
    id: int
    turns: int
    tokens: list[int] = field(default_factory=lambda: [SYSTEM])

    def conversation(self) -> Conversation:
        sizes, total = [], 0
        for tokens in self.tokens:
            total += tokens
            sizes.append(total)
        marks = (-1, *(hash((self.id, n)) for n in range(1, len(sizes))))
        return Conversation(marks, tuple(sizes), total)


class Request(Queued):
    """``conversation``: as it is when the request is made."""

    def __init__(self, client: int, talk: Talk, asked_s: float, answer: int) -> None:
        super().__init__(asked_s, str(client))
        self.talk = talk
        self.conversation = talk.conversation()
        self.asked_s = asked_s
        self.answer = answer
        self.prompt_left = 0.0
        self.answer_left = 0.0
        self.first_s = 0.0


class Process:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.requests: list[Request] = []
        self.prompts = PromptMarks()
        self.cache: OrderedDict[int, int] = OrderedDict()  # conversation: tokens
        self.at_s = 0.0

    def take(self, request: Request, now_s: float) -> int:
        """Start the request. Returns the number of cached tokens of its prompt."""
        self.move(now_s)
        prompt = sum(request.talk.tokens)
        cached = self.cache.pop(request.talk.id, SYSTEM if self.cache else 0)
        request.prompt_left, request.answer_left = max(1.0, prompt - cached), float(request.answer)
        self.requests.append(request)
        self.cache[request.talk.id] = prompt + request.answer
        while len(self.cache) > KEPT:
            self.cache.popitem(last=False)
        return cached

    def rates(self) -> tuple[float, float]:
        """Tokens a second for each prompt, and for each answer."""
        reading = sum(request.prompt_left > 0.0 for request in self.requests)
        answering = len(self.requests) - reading
        if reading:
            return self.machine.prompt / reading, self.machine.prompt / BATCH
        return 0.0, self.machine.answer / (1.0 + self.machine.shared * max(0, answering - 1))

    def next_s(self) -> float:
        prompt, answer = self.rates()
        ends = [
            request.prompt_left / prompt if request.prompt_left > 0 else request.answer_left / answer
            for request in self.requests
        ]
        return self.at_s + min(ends, default=float("inf"))

    def move(self, now_s: float) -> list[Request]:
        """Advance to ``now_s``. Returns the requests that have ended."""
        prompt, answer = self.rates()
        passed_s, self.at_s = now_s - self.at_s, now_s
        done = []
        for request in self.requests:
            if request.prompt_left > 0.0:
                request.prompt_left -= prompt * passed_s
                if request.prompt_left <= 1e-6:
                    request.prompt_left, request.first_s = 0.0, now_s
            else:
                request.answer_left -= answer * passed_s
                if request.answer_left <= 1e-6:
                    done.append(request)
        for request in done:
            self.requests.remove(request)
        return done


@dataclass(slots=True)
class Seen:
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0


def play(
    machine: Machine,
    clients: int,
    max_busier: float,
    *,
    turns: int,
    seed: int,
    processes: int = 2,
    in_order: bool = False,
) -> Seen:
    """``in_order``: a free process gets the next request, whatever the caches hold."""
    rng = random.Random(seed)
    servers = [Process(machine) for _ in range(processes)]
    seen, queue = Seen(), FairQueue[Request]()
    ids = iter(range(1, 1 << 30))
    talks = {client: Talk(next(ids), 0) for client in range(clients)}
    due = [(rng.expovariate(1 / THINK_S), client) for client in range(clients)]
    heapq.heapify(due)
    now_s, count = 0.0, 0

    def serve() -> None:
        nonlocal count
        while queue and (free := [one_server for one_server in servers if len(one_server.requests) < SLOTS]):
            known = max_busier != NONE
            request = queue.pop(suits=partial(suits_a_free_one, servers) if known and not in_order else None)
            conversation = request.conversation
            candidates = [
                Candidate(
                    len(server.requests) / SLOTS,
                    server.prompts.fit(conversation) if known else 0.0,
                    server.prompts.turn,
                )
                for server in free
            ]
            server = free[choose(candidates, max_busier)]
            count += 1
            server.prompts.add(conversation, count)
            seen.cached += server.take(request, now_s)
            seen.prompt += conversation.size

    while len(seen.whole_s) < turns:
        now_s = min(due[0][0] if due else float("inf"), *(one_server.next_s() for one_server in servers))
        for server in servers:
            for request in server.move(now_s):
                seen.first_s.append(request.first_s - request.asked_s)
                seen.whole_s.append(now_s - request.asked_s)
                request.talk.tokens.append(request.answer)
                heapq.heappush(due, (now_s + rng.expovariate(1 / THINK_S), int(request.client)))
        while due and due[0][0] <= now_s:
            _, client = heapq.heappop(due)
            talk = talks[client]
            if talk.turns == 0:
                talk = talks[client] = Talk(next(ids), 1 + int(rng.expovariate(1 / (TURNS - 1))))
                talk.tokens.append(rng.randint(100, 1500))  # a first question often brings a text with it
            else:
                talk.tokens.append(rng.randint(20, 300))
            talk.turns -= 1
            queue.add(Request(client, talk, now_s, rng.randint(50, 400)))
        serve()
    return seen


def suits_a_free_one(servers: Sequence[Process], request: Request) -> bool:
    found = homes([server.prompts.fit(request.conversation) for server in servers])
    return not found or any(len(servers[index].requests) < SLOTS for index in found)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    max_busier: float
    in_order: bool = False


OURS = Rule(f"**affinity, {MAX_BUSIER:.2f}**", MAX_BUSIER)
RULES = (
    Rule("least busy", NONE),
    Rule("affinity, 0.00", 0.0),
    Rule("affinity, 0.25", 0.25),
    OURS,
    Rule("affinity always", ALWAYS),
    Rule(f"affinity, {MAX_BUSIER:.2f}, in order", MAX_BUSIER, in_order=True),
)


def row(machine: Machine, clients: int, rule: Rule, *, turns: int = 3000, seeds: int = 4) -> str:
    """A line of the table."""
    runs = [
        play(machine, clients, rule.max_busier, turns=turns, seed=seed, in_order=rule.in_order)
        for seed in range(seeds)
    ]
    whole_s = sorted(seconds for run in runs for seconds in run.whole_s)
    return (
        f"| {machine.name} | {clients} | {rule.name} "
        f"| {sum(run.cached for run in runs) / sum(run.prompt for run in runs):.0%} "
        f"| {fmean(seconds for run in runs for seconds in run.first_s):.2f} s "
        f"| {fmean(whole_s):.1f} s | {whole_s[int(0.95 * len(whole_s))]:.1f} s |"
    )


def table(*, turns: int, seeds: int) -> str:
    rows = [
        "| machine | clients | choice | cached | first token, mean | answer, mean | answer, 95 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for machine in MACHINES:
        for clients in machine.clients:
            rows += [row(machine, clients, rule, turns=turns, seeds=seeds) for rule in RULES]
    return "\n".join(rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3000)


def main(options: argparse.Namespace) -> int:
    print(table(turns=options.turns, seeds=options.seeds))
    return 0
