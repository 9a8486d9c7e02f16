"""Four models of different classes in memory for two: correct answers, with few loads."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

import llamasup
from llamasup.core.config.config_keys import Config, Memory
from llamasup.core.pool.eviction_policy import ResidencyPolicy
from llamasup.core.settings.model import ModelEntry
from llamasup.core.settings.units import Size
from tests.kit import models
from tests.kit.architectures import tiny_model as tiny_of
from tests.kit.patience import PATIENCE_S
from tests.kit.residency_sim import Request, replay
from tests.kit.residency_world import Model
from tests.kit.tiny import tiny_decoder

CLIENTS, REQUESTS_PER_CLIENT = 8, 25


@dataclass(frozen=True, slots=True)
class Kind:
    """One class of models: its request, and the part of the answer that must always be the same."""

    content: Callable[[], bytes]
    path: str
    body: dict[str, Any]
    read: Callable[[Any], Any]


def _vector(answer: Any) -> list[float]:
    return [round(value, 3) for value in answer["data"][0]["embedding"]]


def _scores(answer: Any) -> dict[int, float]:
    return {result["index"]: round(result["relevance_score"], 2) for result in answer["results"]}


ROOM_BYTES = 1 << 20  # the sizes of a later load can be some pages larger
TEXT = {"prompt": "Once upon", "max_tokens": 6, "temperature": 0, "seed": 1}
KINDS = {
    "decoder": Kind(tiny_decoder, "/v1/completions", TEXT, lambda answer: answer["choices"][0]["text"]),
    "recurrent": Kind(
        lambda: tiny_of("mamba"), "/v1/completions", TEXT, lambda answer: answer["choices"][0]["text"]
    ),
    "encoder": Kind(lambda: models.tiny_encoder(1), "/v1/embeddings", {"input": "hello"}, _vector),
    "reranker": Kind(
        models.tiny_reranker, "/v1/rerank", {"query": "cat", "documents": ["dog", "cat hello"]}, _scores
    ),
}


def config_of(folder: Path, ram_bytes: int, **options: Any) -> Config:
    entries = {}
    for name, kind in KINDS.items():
        path = folder / f"{name}.gguf"
        path.write_bytes(kind.content())
        entries[name] = ModelEntry(path=str(path), ctx_size=512, parallel=1, **options)
    return Config(models=entries, memory=Memory(ram=Size(bytes=ram_bytes)), swap_after_s=0.2)


def ask(client: httpx.Client, name: str) -> tuple[Any, Request]:
    """The constant part of the answer, and the request with its arrival and service time."""
    kind = KINDS[name]
    began_s = time.monotonic()
    answer = client.post(kind.path, json={"model": name, **kind.body})
    took_s = time.monotonic() - began_s
    assert answer.status_code == 200, (name, answer.text)
    waited = re.findall(r"(?:queue|load);dur=([\d.]+)", answer.headers["server-timing"])
    return kind.read(answer.json()), Request(name, began_s, took_s - sum(map(float, waited)) / 1000)


def timed_load(server: llamasup.Server, name: str) -> float:
    began_s = time.monotonic()
    server.load(name)
    return time.monotonic() - began_s


def test_4_models_in_memory_for_2_answer_200_requests_with_few_loads(
    runtime: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with llamasup.serve(config=config_of(tmp_path, 1 << 40), runtime=runtime) as server:
        load_s = {name: timed_load(server, name) for name in KINDS}
        expected = {name: ask(server.client, name)[0] for name in KINDS}
        needs = {model["id"]: model["needs_bytes"]["ram"] for model in server.status()["models"]}
    budget = sum(sorted(needs.values())[-2:]) + ROOM_BYTES
    assert sum(sorted(needs.values())[:3]) > budget, "three of them would fit"

    config = config_of(tmp_path, budget)
    with llamasup.serve(config=config, runtime=runtime) as server, ThreadPoolExecutor(CLIENTS) as clients:
        events: list[Any] = []
        reading = threading.Thread(target=lambda: events.extend(server.events()))
        reading.start()

        def client(number: int) -> list[Request]:
            chance = random.Random(number)
            requests = []
            for _ in range(REQUESTS_PER_CLIENT):
                # Two of the models get most of the requests.
                (name,) = chance.choices(tuple(KINDS), weights=(10, 1, 8, 1))
                found, request = ask(server.client, name)
                assert found == expected[name], name
                requests.append(request)
            return requests

        requests = [
            request for client_requests in clients.map(client, range(CLIENTS)) for request in client_requests
        ]
        resident = {model["id"] for model in server.status()["models"] if model["state"] == "ready"}
        server.stop()
        reading.join(PATIENCE_S)

    loads = Counter(event["model"] for event in events if event.get("state") == "ready")
    unloads = Counter(event["reason"] for event in events if event["event"] == "unload")
    assert len(requests) == CLIENTS * REQUESTS_PER_CLIENT
    assert len(resident) <= 2
    began_s = min(one_request.arrived_s for one_request in requests)
    trace = [
        Request(one_request.model, one_request.arrived_s - began_s, one_request.service_s)
        for one_request in requests
    ]
    models_simulated = [Model(id=name, needs={"ram": needs[name]}, load_s=load_s[name]) for name in KINDS]
    simulated = replay(
        models_simulated, trace, {"ram": budget}, ResidencyPolicy(time_slice_s=config.swap_after_s)
    )
    with capsys.disabled():
        print(f"\n{runtime}: {sum(loads.values())} loads {dict(loads)}, unloaded {dict(unloads)};", end=" ")
        print(f"by the simulation {sum(simulated.loads.values())} {dict(simulated.loads)}")
    # In the simulation, requests arrive at the measured times, and loads take as long as the first ones. So
    # it is no bound: a busy machine needed 1.64 times as many loads.
    trace.sort(key=lambda request: request.arrived_s)
    changes = sum(request.model != following.model for request, following in pairwise(trace))
    assert sum(loads.values()) <= min(2.5 * sum(simulated.loads.values()), changes / 2)


def test_repeated_crashes_of_one_model_do_not_affect_the_others(runtime: str, tmp_path: Path) -> None:
    """S17. The processes of the other models stay the same."""
    config = config_of(tmp_path, 1 << 40)
    with llamasup.serve(config=config, runtime=runtime) as server:
        expected = {name: ask(server.client, name)[0] for name in KINDS}
        pids = {model["id"]: model["pid"] for model in server.status()["models"]}
        killed: set[int] = set()
        over = threading.Event()
        events = server.events()

        def crash() -> None:
            """Kill each new process of the model until llamasup gives up."""
            for event in events:
                if event.get("model") == "recurrent" and event.get("state") in ("warming", "ready"):
                    pid = next(
                        model["pid"] for model in server.status()["models"] if model["id"] == "recurrent"
                    )
                    if pid is not None and pid not in killed:
                        killed.add(pid)
                        os.kill(pid, signal.SIGKILL)
                elif event.get("model") == "recurrent" and event.get("state") == "failed":
                    over.set()
                    return

        killer = threading.Thread(target=crash)
        killer.start()
        os.kill(pids["recurrent"], signal.SIGKILL)
        while not over.is_set():
            for name in ("decoder", "encoder", "reranker"):
                assert ask(server.client, name)[0] == expected[name]
        killer.join(PATIENCE_S)

        refused = server.client.post("/v1/completions", json={"model": "recurrent", **TEXT})
        assert refused.status_code == 503
        assert refused.json()["error"]["cause"] == "killed", refused.text
        assert int(refused.headers["retry-after"]) > 0
        after = {model["id"]: model for model in server.status()["models"]}
        assert {name: after[name]["pid"] for name in pids if name != "recurrent"} == {
            name: pid for name, pid in pids.items() if name != "recurrent"
        }
        server.load("recurrent")  # a manual load tries it again
        assert ask(server.client, "recurrent")[0] == expected["recurrent"]


@pytest.mark.one_runtime
def test_paths_that_no_llama_server_has_load_nothing(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(models.tiny_decoder() + b"\0")
    entries = {
        "tiny": ModelEntry(path=str(tiny_model), ctx_size=512, aliases=("claude-sonnet[1m]", "gpt 4")),
        "other": ModelEntry(path=str(tmp_path / "other.gguf"), ctx_size=512),
    }
    paths = (
        "/api/show",
        "/v1/images/generations",
        "/v1/audio/speech",
        "/v1/v1/completions",
        "/sdapi/v1/txt2img",
    )
    config = Config(models=entries)
    with llamasup.serve(config=config, runtime=runtime, environ=dict(os.environ)) as server:
        for path in (*paths, "/v1/moderations", "/v1/threads", "/generate"):
            answer = server.client.post(path, json={"model": "tiny", "prompt": "Once"})
            assert (answer.status_code, answer.json()["error"]["cause"]) == (404, "unknown_path")
        assert {model["state"] for model in server.status()["models"]} == {"stopped"}
        assert server.client.get("/props").json()["role"] == "router"
        for name in ("tiny", "claude-sonnet[1m]", "gpt 4"):
            body = {"model": name, "prompt": "Once", "max_tokens": 1}
            assert server.client.post("//v1/completions/", json=body).status_code == 200
        # A loaded model gets them: its own answer has no cause.
        answer = server.client.post("/v1/threads", json={"model": "tiny"})
        assert (answer.status_code, "cause" in answer.json()["error"]) == (404, False)
