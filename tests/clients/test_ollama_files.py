"""Models are downloaded and deleted over Ollama's API, with the client of Ollama, unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ollama import Client, ResponseError

from llamasup.testing.tiny import tiny_decoder
from tests.clients.conftest import Served
from tests.e2e.driver import PATIENCE_S, started
from tests.hub import Fault, Hub, running_hub
from tests.patience import eventually
from tests.ports import free_port
from tests.real.remains import folders_of

pytestmark = pytest.mark.real

KEYS = {"any": "inference", "few": "inference models=tiny", "ops": "inference,control"}
HI: list[Any] = [{"role": "user", "content": "hi"}]
FAR = "hf.co/org/far:Q4_K_M"
FILE = "far-Q4_K_M.gguf"


@dataclass(frozen=True, slots=True)
class Place:
    """A llamasup that downloads from ``hub`` into ``folder``."""

    url: str
    hub: Hub
    folder: Path
    connect: Callable[[str], Client]

    @property
    def file(self) -> Path:
        return self.folder / "org" / "far" / FILE

    def names(self, key: str = "any") -> set[str | None]:
        return {model.model for model in self.connect(key).list().models}


@pytest.fixture
def place(runtime: str, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as opened:
        hub = opened.enter_context(running_hub())
        yield opened.enter_context(serving(runtime, tmp_path, hub, on_demand=True))


def serving(runtime: str, home: Path, hub: Hub, *, on_demand: bool) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def serve() -> Iterator[Place]:
        hub.repos["org/far"] = {FILE: tiny_decoder()}
        keys = home / "keys"
        keys.write_text("".join(f"sk-{name} name={name} rights={said}\n" for name, said in KEYS.items()))
        keys.chmod(0o600)
        own, folder = home / "own.gguf", home / "models"
        folder.mkdir()
        own.write_bytes(tiny_decoder())
        address = f"127.0.0.1:{free_port()}"
        config = {
            "listen": "127.0.0.1:0",
            "ollama": {"listen": address},
            "runtime": runtime,
            "auth": {"api_key_file": str(keys)},
            "models_dir": [str(folder)],
            "downloads": {"on_demand": on_demand, "endpoint": hub.url, "private_addresses": True, "parallel": 1},
            "models": {"tiny": {"path": str(own)}, "named": {"repo": "org/far:Q4_K_M"}} if not on_demand else {"tiny": {"path": str(own)}},
            "defaults": {"ctx_size": 512},
        }
        (home / "config.yaml").write_text(json.dumps(config))  # which is YAML
        env = {**os.environ, **folders_of(home)}
        with ExitStack() as opened, started("serve", "--config", str(home / "config.yaml"), env=env) as running:
            def connect(key: str) -> Client:
                headers = {"Authorization": f"Bearer sk-{key}"}
                return opened.enter_context(Client(f"http://{address}", headers=headers, timeout=PATIENCE_S))

            running.url
            yield Place(f"http://{address}", hub, folder, connect)
            opened.close()
            assert running.stop() == 0

    return serve()


def refused(call: Callable[[], Any], status: int) -> str:
    with pytest.raises(ResponseError) as caught:
        found = call()
        if isinstance(found, Iterator):
            list(found)
    assert caught.value.status_code == status
    return str(caught.value.error)


def test_it(place: Place) -> None:
    any_ = place.connect("any")
    for line in any_.pull(FAR, stream=True):
        print(line)
    print(place.names(), list(place.folder.rglob("*")))
    print(any_.chat(FAR, HI, options={"num_predict": 2}))
    print(any_.ps())
    print(refused(lambda: any_.delete(FAR), 403))
    ops = place.connect("ops")
    print(ops.delete(FAR))
    print(place.names(), list(place.folder.rglob("*")))
    print(refused(lambda: ops.delete("tiny"), 409))
    print(refused(lambda: ops.pull("llama3.2"), 404))
    print(refused(lambda: ops.pull("llama3.2", stream=True), 404))
    print(refused(lambda: place.connect("few").pull(FAR), 403))
    print(refused(lambda: ops.pull("hf.co/org/none"), 404))
    with pytest.raises(ResponseError) as e:
        list(ops.pull("hf.co/org/none", stream=True))
    print(e.value, e.value.status_code)
    print(place.connect("few").pull("tiny"))
    print(refused(lambda: ops.pull("tiny", insecure=True), 400))
    assert 0
