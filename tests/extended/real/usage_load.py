"""Mixed requests to a real llama-server with crashes, and three counts of them that must agree.

The clients add up what the answers report, llama-server counts in its /metrics, and llamasup in its usage.
Before a crash, /metrics is read with no request in flight, so that the counts of the server that dies are
known. Then requests begin that the clients count as well: one is left by its client, the crash cuts two
streams, and the next server answers a plain request.
"""

from __future__ import annotations

import json
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from tests.e2e.driver import PATIENCE_S, Llamasup
from tests.kit.patience import eventually

__all__ = ["COUNTS", "KEYS", "UsageLoad", "counts_of", "write_keys"]

KEYS = ("phone", "laptop", "build")
COUNTS = ("requests", "errors", "tokens_prompt", "tokens_cached", "tokens_completion", "unreported")
LONG = 1500  # tokens of the answer after a crash
CUT = 7000  # tokens of an answer that does not reach its end
CONNECTIONS = 6
TEXT = "once upon a time there was a small server that answered every request with great care"

Body = dict[str, Any]


class UsageLoad:
    """``counted``: what the clients have counted, by key. ``generations``: llama-server's counts of each."""

    def __init__(self, running: Llamasup, seed: int = 1) -> None:
        self.counted: dict[str, Counter[str]] = {key: Counter() for key in KEYS}
        self.kinds: Counter[str] = Counter()
        self.generations: list[Counter[str]] = []
        self.crashes = 0
        self._running = running
        self._random = random.Random(seed)  # a reproducible load
        self._lock = threading.Lock()
        self._warm_up = self._scrape()  # llamasup's own requests, the same in each generation

    def run(self, requests: int, crashes: int) -> None:
        """Send so many requests, with the crashes evenly in between."""
        for phase in range(crashes + 1):
            if phase:
                self.crash()
            self.requests((requests * (phase + 1)) // (crashes + 1) - requests * phase // (crashes + 1))
        self.finish()

    def requests(self, count: int) -> None:
        """Send mixed requests over some connections at once, and wait for all answers."""
        kinds = self._random.choices(list(_KINDS), _WEIGHTS, k=count)
        jobs = [(kind, self._random.choice(KEYS), self._random.random()) for kind in kinds]
        shares = [jobs[number::CONNECTIONS] for number in range(CONNECTIONS)]
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            for done in [threads.submit(self._share, share) for share in shares]:
                done.result()

    def crash(self) -> None:
        """Kill the server with requests in flight, and wait for what becomes of them."""
        self.finish()
        generation = self._status()["generation"]
        with (
            httpx.Client(base_url=self._running.url, timeout=PATIENCE_S) as client,
            ThreadPoolExecutor(1) as threads,
        ):
            left = self._long_stream(client, KEYS[1])
            next(left)
            left.close()
            eventually(lambda: self._status()["in_flight"] == 0)
            (child,) = self._running.children()
            cut = [self._long_stream(client, KEYS[0]) for _ in range(2)]
            for lines in cut:
                next(lines)
            child.suspend()  # so that no stream ends before the kill
            replayed = threads.submit(self._replayed)
            eventually(lambda: self._status()["in_flight"] == 3)
            child.send_signal(signal.SIGKILL)
            for lines in cut:
                assert any('"error"' in line for line in lines)
            replayed.result()
        self._note("left by its client", KEYS[1], Counter(requests=1, unreported=1))
        for _ in cut:
            self._note("cut by a crash", KEYS[0], Counter(requests=1, errors=1, unreported=1))
        self._running.wait_for_ready_after(generation)
        self.crashes += 1

    def finish(self) -> None:
        """Read the counts of the current server, with no request in flight."""
        self.generations.append(self._scrape() - self._warm_up)

    def usage(self, by: str) -> Mapping[str, Counter[str]]:
        """What llamasup has counted."""
        socket = select_running(discover(), self._running.pid).socket
        with ControlClient(ControlAddress(socket=socket)) as client:
            answer = client.usage(by)
        assert answer["problem"] is None, answer
        return {row[by]: counts_of(row) for row in answer["rows"]}

    def total(self) -> Counter[str]:
        return sum(self.counted.values(), Counter())

    def of_servers(self) -> Counter[str]:
        return sum(self.generations, Counter())

    def _status(self) -> Mapping[str, Any]:
        socket = select_running(discover(), self._running.pid).socket
        with ControlClient(ControlAddress(socket=socket)) as client:
            model: Mapping[str, Any] = client.status()["models"][0]
        return model

    def _scrape(self) -> Counter[str]:
        """llama-server's own counters; its prompt tokens do not include cached ones."""
        text = httpx.get(f"{self._running.url}/metrics", headers=_key(KEYS[0]), timeout=PATIENCE_S).text
        counts: Counter[str] = Counter()
        for name in ("prompt", "predicted"):
            found = re.search(
                rf"^llamacpp:(?:tokens_)?{name}(?:_tokens)?_total(?:{{.*}})? (\S+)$", text, re.M
            )
            assert found is not None, text
            counts[name] = int(float(found[1]))
        return counts

    def _share(self, jobs: Sequence[tuple[str, str, float]]) -> None:
        with httpx.Client(base_url=self._running.url, timeout=PATIENCE_S) as client:
            for kind, key, chance in jobs:
                path, body, status = _KINDS[kind]
                length = 2 + int(chance * 60)
                request = {**body, **_prompt(path, length, body)}
                answer = client.post(path, json=request, headers=_key(key))
                assert answer.status_code == status, (kind, answer.text)
                reported = _reported(answer.text) if status == 200 else Counter()
                self._note(kind, key, reported | Counter(requests=1, errors=int(status >= 400)))

    def _note(self, kind: str, key: str, counts: Counter[str]) -> None:
        with self._lock:
            self.kinds[kind] += 1
            self.counted[key] += counts

    def _long_stream(self, client: httpx.Client, key: str) -> Generator[str]:
        body = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": CUT, "ignore_eos": True}
        request = {**body, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=request, headers=_key(key)) as answer:
            assert answer.status_code == 200
            yield from (line for line in answer.iter_lines() if line)

    def _replayed(self) -> None:
        body = {"prompt": "Once", "n_predict": LONG, "ignore_eos": True}
        url = f"{self._running.url}/completion"
        answer = httpx.post(url, json=body, headers=_key(KEYS[2]), timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        self._note("answered after a crash", KEYS[2], _reported(answer.text) | Counter(requests=1))


def write_keys(path: Path) -> Path:
    """The key file of the clients."""
    path.write_text("".join(f"secret-{name} name={name}\n" for name in KEYS))
    path.chmod(0o600)
    return path


def counts_of(row: Mapping[str, Any]) -> Counter[str]:
    """The counts in a row of the ``usage`` object."""
    return Counter({name: row[name] for name in COUNTS})


def _key(name: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer secret-{name}"}


_SHORT: Body = {"ignore_eos": True}
_USAGE: Body = {"stream": True, "stream_options": {"include_usage": True}}
# For each kind: path, body without the prompt, status and how many of 100 requests.
_TABLE: Sequence[tuple[str, str, Body, int, int]] = (
    ("completion", "/completion", {"n_predict": 6, **_SHORT}, 200, 25),
    ("completion, streamed", "/completion", {"n_predict": 9, "stream": True, **_SHORT}, 200, 15),
    ("three prompts", "/completion", {"n_predict": 3, "prompts": 3, **_SHORT}, 200, 5),
    ("chat", "/v1/chat/completions", {"max_tokens": 8, **_SHORT}, 200, 20),
    ("chat, streamed", "/v1/chat/completions", {"max_tokens": 12, "stream": True, **_SHORT}, 200, 10),
    ("chat, streamed with usage", "/v1/chat/completions", {"max_tokens": 5, **_USAGE, **_SHORT}, 200, 10),
    ("one token", "/v1/completions", {"max_tokens": 1, **_SHORT}, 200, 5),
    ("invalid request", "/completion", {"n_predict": 4, "invalid": True}, 400, 5),
    ("tokenize", "/tokenize", {}, 200, 5),
)
_KINDS: Mapping[str, tuple[str, Body, int]] = {
    name: (path, body, status) for name, path, body, status, _ in _TABLE
}
_WEIGHTS = [share for *_, share in _TABLE]


def _prompt(path: str, length: int, body: Body) -> Body:
    """The field of this path with a prompt of some words. Prompts of one length share their beginning."""
    known = TEXT.split()
    words = " ".join(known[number * length % len(known)] for number in range(length))
    if body.get("invalid"):
        return {"prompt": {"words": words}}
    if path == "/tokenize":
        return {"content": words}
    if "chat" in path:
        return {"messages": [{"role": "user", "content": words}]}
    if count := body.get("prompts"):
        return {"prompt": [f"{number} {words}" for number in range(count)]}
    return {"prompt": words}


def _reported(text: str) -> Counter[str]:
    """The tokens that an answer reports, read as a client does: from JSON, or from the events of a stream."""
    if text.startswith(("data:", ":")):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        values = [json.loads(event) for event in events]
        last = [value for value in values if "timings" in value or value.get("usage")]
        return _counts(last[-1])
    answer = json.loads(text)
    return sum(map(_counts, answer if isinstance(answer, list) else [answer]), Counter())


def _counts(answer: Mapping[str, Any]) -> Counter[str]:
    if "timings" in answer:
        timings = answer["timings"]
        prompt, cached, made = timings["prompt_n"], timings["cache_n"], timings["predicted_n"]
        return Counter(tokens_prompt=prompt + cached, tokens_cached=cached, tokens_completion=made)
    if usage := answer.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        return Counter(
            tokens_prompt=usage["prompt_tokens"],
            tokens_cached=details.get("cached_tokens", 0),
            tokens_completion=usage["completion_tokens"],
        )
    return Counter()
