"""``llamasup serve`` with more models than fit, under random load and changes; every answer is checked.

The clients are here; stress_chaos.py makes the changes, and stress_expectations.py decides which answers are
correct at which time. At intervals all activity stops, so that the test can compare memory and processes with
the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.driver import NEW_INTERPRETER, Llamasup, started
from tests.extended.soak.soak_clients import KEY, post, request
from tests.extended.soak.soak_wire import Wire
from tests.extended.soak.stress_chaos import PAUSE_S, Chaos, Target, write_first
from tests.extended.soak.stress_config import MOVING_ALIAS, StressConfig
from tests.extended.soak.stress_expectations import Expectations, JudgedAnswer, Request, Verdict
from tests.extended.soak.stress_guests import GREEDY_KEY, greedy_burst, poison
from tests.extended.soak.stress_models import KNOWN_WORDS, MODELS, PROMPTS, record_answers
from tests.real.remains import folders_of, remains_of

__all__ = ["Report", "stress"]

CLIENTS = 6
CLIENT_PAUSE_S = 0.15  # on average, between two requests of a client
LONGEST_TOKENS = 1500
CALM_EVERY_S = 20.0
PATIENCE_S = 120.0
MAX_PRINTED = 20
"""The number of violations that are printed. The report contains all of them."""


@dataclass(slots=True)
class Report:
    """The results of a stress run. ``violations`` must be empty."""

    seed: int
    counts: Counter[tuple[str, Verdict]] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    """The causes of the 503 responses."""
    done: Counter[str] = field(default_factory=Counter)
    command_results: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    longest_wait_s: float = 0.0
    idle_checks: int = 0
    """How often memory and processes were compared with the status."""
    max_loaded_seen: int = 0
    budget_bytes: int = 0
    violations: list[str] = field(default_factory=list)

    def violation(self, what: str) -> None:
        self.violations.append(what)
        if len(self.violations) <= MAX_PRINTED:
            print(f"OFF: {what}", file=sys.stderr, flush=True)

    def count(self, *verdicts: Verdict) -> int:
        return sum(count for (_, verdict), count in self.counts.items() if verdict in verdicts)

    def summary(self) -> dict[str, str]:
        """The counts of all requests and changes: a column of docs/measurements.md."""
        verdicts = (verdict for verdict in Verdict if self.count(verdict) or verdict is Verdict.WRONG)
        return {
            **{verdict.value: f"{self.count(verdict):,}" for verdict in verdicts},
            "longest wait of a client": f"{self.longest_wait_s:.1f} s",
            "changes and faults": f"{self.done.total():,}",
            "loads of a model": f"{self.events['loaded']:,}",
        }

    def table(self) -> Iterator[str]:
        yield f"| Request | {' | '.join(Verdict)} |"
        yield f"|---|{'---:|' * len(Verdict)}"
        for kind in dict.fromkeys(kind for kind, _ in sorted(self.counts)):
            yield f"| {kind} | {' | '.join(str(self.counts[kind, verdict] or '–') for verdict in Verdict)} |"
        yield f"| **all** | {' | '.join(f'**{self.count(verdict):,}**' for verdict in Verdict)} |"
        yield ""
        yield f"Seed {self.seed}; {self.budget_bytes / 1e6:.0f} MB for all models."
        yield f"Longest wait of a client: {self.longest_wait_s:.1f} s."
        yield f"Memory and processes agreed with the status {self.idle_checks} times,"
        yield f"with up to {self.max_loaded_seen} models loaded.\n"
        yield f"Changes and faults: {_listed(self.done)}.\n"
        yield f"Models: {_listed(self.events)}.\n"
        yield f"Commands: {_listed(self.command_results)}."
        if self.causes:
            yield f"\nCauses of 503: {_listed(self.causes)}."


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {what}" for what, count in sorted(counts.items())) or "none"


def stress(runtime: str, home: Path, *, duration_s: float, seed: int) -> Report:
    """``home``: for files and llamasup's folders. Its path must be short, because it contains sockets."""
    report = Report(seed)
    recordings, folder = home / "recordings", home / "models"
    for new_folder in (recordings, folder):
        new_folder.mkdir()
    answers, needs = record_answers(runtime, recordings)
    # Three of the smallest fit, or the two largest.
    report.budget_bytes = max(round(1.03 * sum(sorted(needs.values())[:3])), 2 * max(needs.values()))
    keys = folder / "keys"
    keys.write_text(f"{KEY} name=stress rights=inference,control\n{GREEDY_KEY} name=greedy\n")
    keys.chmod(0o600)
    environ = {**os.environ, **folders_of(home)}
    ready_file = home / "ready.json"
    expectations, config = Expectations(answers), StressConfig.first(folder, report.budget_bytes)
    write_first(expectations, config)
    words = ["--config", str(config.path), "--runtime", runtime, "--port", "0"]
    words += ["--log-level", "warning", "--ready-file", str(ready_file)]
    with started("serve", *words, env=environ, prefix=NEW_INTERPRETER) as running:
        asyncio.run(_Stress(running, environ, expectations, config, report, duration_s).run())
        code = running.stop()
    if code:
        report.violation(f"llamasup ended with {code}: {running.stderr_text[-4000:]}")
    own = [line for line in running.stderr if not line.startswith("    | ")]  # lines of llama-server
    if any("Traceback" in line or "bug" in line for line in own):
        report.violation(f"llamasup said: {running.stderr_text[-8000:]}")
    for left in remains_of(home, ready_file):
        report.violation(f"left behind: {left}")
    for event in running.all_events():
        if event["event"] == "unload":
            report.events[f"unloaded ({event['reason']})"] += 1
        elif event.get("state") == "ready":
            report.events["loaded"] += 1
        elif event["event"] in ("exit", "failed"):
            report.events[f"{event['event']} ({event['cause']})"] += 1
    return report


class _Stress:
    def __init__(
        self,
        running: Llamasup,
        environ: Mapping[str, str],
        expectations: Expectations,
        config: StressConfig,
        report: Report,
        duration_s: float,
    ) -> None:
        self._running = running
        self._environ = environ
        self._expectations = expectations
        self._config = config
        self._report = report
        self._duration_s = duration_s
        self._port = int(running.wait_for("ready")["port"])
        self._over = False
        self._poisons = 0
        self._go = asyncio.Event()
        """Cleared during an idle check."""
        self._in_flight = 0
        self._idle = asyncio.Event()
        """Set while no client waits for an answer."""
        self._idle.set()

    async def run(self) -> None:
        report = self._report
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._port}",
            headers={"Authorization": f"Bearer {KEY}"},
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as http:
            self._http = http
            rng = random.Random(f"{report.seed} chaos")
            target = Target(self._running, http, self._environ)
            chaos = Chaos(target, self._expectations, self._config, rng, report.violation, report.done)
            self._go.set()
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    tasks.create_task(self._client(random.Random(f"{report.seed} client {number}")))
                await self._disturb(chaos, tasks)
                self._over = True
                self._go.set()
            await self._final_check(chaos)
            report.command_results = chaos.command_results

    async def _disturb(self, chaos: Chaos, tasks: asyncio.TaskGroup) -> None:
        """Make changes in rounds. Each round ends with an idle check."""
        rounds = max(1, round(self._duration_s / CALM_EVERY_S))
        for _ in range(rounds):
            deadline_s = time.monotonic() + self._duration_s / rounds
            while time.monotonic() < deadline_s:
                await chaos.step(tasks)
                await asyncio.sleep(chaos.rng.expovariate(1 / PAUSE_S))
            self._go.clear()
            await self._idle.wait()
            await chaos.replace_loaded_file(tasks)
            await self._check_idle(chaos)
            self._go.set()

    # --- clients

    async def _client(self, rng: random.Random) -> None:
        kinds, weights = zip(*_KINDS, strict=True)
        while not self._over:
            await self._go.wait()
            kind = rng.choices(kinds, weights)[0]
            self._in_flight += 1
            self._idle.clear()
            try:
                for seen in await getattr(self, f"_{kind.replace(' ', '_')}")(rng):
                    self._note(kind, seen)
            except OSError as error:
                self._note(kind, JudgedAnswer(Verdict.WRONG, f"no connection: {error!r}"))
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()
            await asyncio.sleep(rng.expovariate(1 / CLIENT_PAUSE_S))

    def _note(self, kind: str, seen: JudgedAnswer) -> None:
        self._report.counts[kind, seen.verdict] += 1
        if seen.verdict is Verdict.WRONG:
            self._report.violation(f"{kind}: {seen.detail}")
        elif seen.verdict is Verdict.UNAVAILABLE:
            self._report.causes[seen.detail] += 1

    async def _plain(self, rng: random.Random) -> list[JudgedAnswer]:
        async with Wire(self._port) as wire:
            return [await self._ask(wire, rng, rng.randint(1, 60), is_stream=False)]

    async def _stream(self, rng: random.Random) -> list[JudgedAnswer]:
        async with Wire(self._port) as wire:
            return [await self._ask(wire, rng, rng.randint(1, KNOWN_WORDS), is_stream=True)]

    async def _long_stream(self, rng: random.Random) -> list[JudgedAnswer]:
        async with Wire(self._port) as wire:
            return [await self._ask(wire, rng, rng.randint(KNOWN_WORDS, LONGEST_TOKENS), is_stream=True)]

    async def _several_on_one_connection(self, rng: random.Random) -> list[JudgedAnswer]:
        """Requests for different models. A cut answer ends the connection."""
        seen: list[JudgedAnswer] = []
        async with Wire(self._port) as wire:
            for _ in range(rng.randint(2, 6)):
                seen.append(await self._ask(wire, rng, rng.randint(1, 20), is_stream=rng.random() < 0.3))
                if seen[-1].verdict in (Verdict.CUT, Verdict.WRONG):
                    break
        return seen

    async def _unknown_name(self, rng: random.Random) -> list[JudgedAnswer]:
        name = rng.choice(("m8", "m", "alias", "../m0.gguf", "m0.gguf/..", "none", "m0 m1"))
        async with Wire(self._port) as wire:
            return [await self._ask(wire, rng, 5, is_stream=rng.random() < 0.5, name=name)]

    async def _leave(self, rng: random.Random) -> list[JudgedAnswer]:
        """Disconnect during the load of the model, in mid-stream, or at the end."""
        after_bytes, after_s = rng.choice((0, 200, 5000)), rng.uniform(0.0, 2.0)
        path, body = rng.choice(PROMPTS).request(_name(rng), rng.randint(10, LONGEST_TOKENS))
        async with Wire(self._port) as wire:
            await wire.send(post(path, {**body, "stream": rng.random() < 0.7}))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await wire.read(after_bytes or LONGEST_TOKENS * 1000)
            if rng.random() < 0.5:
                wire.reset()
        return [JudgedAnswer(Verdict.ABANDONED)]

    async def _greedy_key(self, rng: random.Random) -> list[JudgedAnswer]:
        path, body = rng.choice(PROMPTS).request(_name(rng), 5)
        return await greedy_burst(self._port, path, body)

    async def _poison(self, rng: random.Random) -> list[JudgedAnswer]:
        self._poisons += 1
        model = rng.choice(sorted(self._config.models))
        return [await poison(self._http, self._port, self._expectations, model, self._poisons)]

    async def _list(self, rng: random.Random) -> list[JudgedAnswer]:
        """``/v1/models``: exactly the models of a config that may be in force."""
        began_s = time.monotonic()
        async with Wire(self._port) as wire:
            await wire.send(request("GET", "/v1/models"))
            answer = await wire.answer()
        ids = [model["id"] for model in (answer.json or {}).get("data", ())] if answer.whole else []
        if set(ids) in self._expectations.listings(began_s, time.monotonic()) and len(set(ids)) == len(ids):
            return [JudgedAnswer(Verdict.RIGHT)]
        return [JudgedAnswer(Verdict.WRONG, f"/v1/models has {ids}: {answer}")]

    async def _ask(
        self, wire: Wire, rng: random.Random, tokens: int, *, is_stream: bool, name: str = ""
    ) -> JudgedAnswer:
        prompt, name = rng.choice(PROMPTS), name or _name(rng)
        request = Request(name, prompt, tokens, is_stream, time.monotonic())
        path, body = prompt.request(name, tokens)
        await wire.send(post(path, {**body, "stream": is_stream}))
        answer = await wire.answer()
        now_s = time.monotonic()
        self._report.longest_wait_s = max(self._report.longest_wait_s, now_s - request.sent_s)
        return self._expectations.judge(request, answer, now_s)

    # --- idle checks

    async def _check_idle(self, chaos: Chaos) -> None:
        """Without requests and changes, the status, the budget and the processes must agree."""
        await chaos.wait_until_done()
        await self._idle.wait()
        deadline_s = time.monotonic() + PATIENCE_S
        while faults := await self._faults(chaos):
            if time.monotonic() > deadline_s:
                self._report.violation(f"not in order although nothing happens: {'; '.join(faults)}")
                break
            await asyncio.sleep(0.1)
        report = self._report
        report.idle_checks += 1
        print(
            f"calm {report.idle_checks}: {report.count(Verdict.RIGHT)} right answers",
            file=sys.stderr,
            flush=True,
        )

    async def _faults(self, chaos: Chaos) -> list[str]:
        """The disagreements between the status, the budget and the processes."""
        status = await chaos.target.status()
        models = status["models"]
        faults = [
            f"{model['id']} is {model['state']}, {model['in_flight']} in flight, {model['queued']} queued"
            for model in models
            if model["state"] not in ("ready", "stopped", "failed") or model["in_flight"] or model["queued"]
        ]
        loaded = [model for model in models if model["state"] == "ready"]
        self._report.max_loaded_seen = max(self._report.max_loaded_seen, len(loaded))
        needed = sum(model["needs_bytes"]["ram"] for model in loaded)
        if needed > status["budget"]["ram"]:
            faults.append(f"{needed} bytes are needed, of a budget of {status['budget']['ram']}")
        config = chaos.config
        if config.max_loaded and len(loaded) > config.max_loaded:
            faults.append(f"{len(loaded)} models are loaded, with max_loaded {config.max_loaded}")
        if len(grouped := [model["id"] for model in loaded if model["id"] in config.group]) > 1:
            faults.append(f"{grouped} are loaded, of one group")
        servers = {process.pid: arguments for process, arguments in chaos.target.servers()}
        if set(servers) != {model["pid"] for model in loaded}:
            faults.append(f"servers {servers}, but the status has {[model['pid'] for model in loaded]}")
        return faults + [
            f"the process of {model['id']} serves another file: {servers.get(model['pid'])}"
            for model in loaded
            if str(config.path_of(model["id"])) not in servers.get(model["pid"], ())
        ]

    async def _final_check(self, chaos: Chaos) -> None:
        """Restart each model. Its answer must be that of its current file."""
        rng = random.Random(f"{self._report.seed} end")
        for model in chaos.config.models:
            answer = await chaos.target.http.post(f"/llamasup/v1/models/{model}/restart", timeout=PATIENCE_S)
            if answer.status_code != 200:
                self._report.violation(f"{model} cannot be started in the end: {answer.text}")
                continue
            self._expectations.file_applied(model, self._expectations.changes_of(model), time.monotonic())
            async with Wire(self._port) as wire:
                seen = await self._ask(wire, rng, KNOWN_WORDS, is_stream=False, name=model)
            self._note("in the end", seen)
            if seen.verdict is not Verdict.RIGHT:
                self._report.violation(f"{model} does not answer in the end: {seen.verdict} {seen.detail}")
        await self._check_idle(chaos)


def _name(rng: random.Random) -> str:
    """A name of a model that the config has, had or will have. Some models are more popular than others."""
    model = rng.choices(MODELS, (8, 6, 4, 3, 2, 2, 1, 1))[0]
    return rng.choice((model, model, f"alias-{model}", MOVING_ALIAS))


_KINDS = (
    ("plain", 10),
    ("stream", 8),
    ("long stream", 3),
    ("several on one connection", 3),
    ("leave", 3),
    ("unknown name", 1),
    ("list", 1),
    ("greedy key", 1),
    ("poison", 1),
)
