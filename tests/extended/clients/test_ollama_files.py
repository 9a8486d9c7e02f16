"""Models are downloaded and deleted over Ollama's API, with the client of Ollama, unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ollama import Client, ResponseError

from tests.clients.conftest import OllamaJs
from tests.e2e.driver import PATIENCE_S, started
from tests.kit.hub import Fault, Hub, running_hub
from tests.kit.patience import eventually
from tests.kit.ports import free_port
from tests.kit.tiny import tiny_decoder
from tests.real.remains import folders_of

KEYS = {"any": "rights=inference", "few": "models=tiny", "ops": "rights=inference,control"}
HI: list[Any] = [{"role": "user", "content": "hi"}]
FAR, FILE = "hf.co/org/far:Q4_K_M", "far-Q4_K_M.gguf"


@dataclass(frozen=True, slots=True)
class Place:
    """A llamasup that downloads from ``hub`` into ``folder``; ``url`` is that of Ollama's API. ``connect``
    makes the client of a key.
    """

    hub: Hub
    url: str
    folder: Path
    connect: Callable[[str], Client]

    @property
    def file(self) -> Path:
        return self.folder / "org" / "far" / FILE

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file())


Start = Callable[..., Place]


@pytest.fixture
def start(runtime: str, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as opened:

        def start(*, on_demand: bool = True, **models: dict[str, str]) -> Place:
            return opened.enter_context(serving(runtime, tmp_path, models, on_demand=on_demand))

        yield start


@contextmanager
def serving(runtime: str, home: Path, models: dict[str, Any], *, on_demand: bool) -> Iterator[Place]:
    keys, own, folder = home / "keys", home / "own.gguf", home / "models"
    keys.write_text("".join(f"sk-{name} name={name} {said}\n" for name, said in KEYS.items()))
    keys.chmod(0o600)
    own.write_bytes(tiny_decoder())
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    with running_hub() as hub:
        hub.repos["org/far"] = {FILE: tiny_decoder()}
        config = {
            "listen": "127.0.0.1:0",
            "ollama": {"listen": address},
            "runtime": runtime,
            "auth": {"api_key_file": str(keys)},
            "models_dir": [str(folder)],
            "downloads": {
                "on_demand": on_demand,
                "endpoint": hub.url,
                "private_addresses": True,
                "parallel": 1,
            },
            "models": {"tiny": {"path": str(own)}, **models},
            "defaults": {"ctx_size": 512},
        }
        path = home / "config.yaml"
        path.write_text(json.dumps(config))  # which is YAML
        with started("serve", "--config", str(path), env={**os.environ, **folders_of(home)}) as running:
            running.wait_for("ready")
            with ExitStack() as clients:

                def connect(key: str) -> Client:
                    headers = {"Authorization": f"Bearer sk-{key}"}
                    client = Client(f"http://{address}", headers=headers, timeout=PATIENCE_S)
                    clients.enter_context(client)
                    return client

                yield Place(hub, f"http://{address}", folder, connect)
            assert running.stop() == 0


def refused(call: Callable[[], Any], status: int) -> str:
    with pytest.raises(ResponseError) as caught:
        found = call()
        if isinstance(found, Iterator):
            list(found)
    assert caught.value.status_code == status
    return str(caught.value.error)


def names(client: Client) -> set[str | None]:
    return {model.model for model in client.list().models}


def test_model_is_pulled_used_and_deleted(start: Start) -> None:
    place = start()
    client, ops = place.connect("any"), place.connect("ops")
    first, *lines, last = client.pull(FAR, stream=True)
    assert (first.status, last.status) == ("pulling manifest", "success")
    size = len(tiny_decoder())
    assert {(line.status, line.total) for line in lines} == {(f"pulling {FAR}", size)}
    assert all(line.digest and (line.completed or 0) <= size for line in lines)
    assert place.file.read_bytes() == tiny_decoder()
    assert FAR in names(client)
    asked = len(place.hub.asked)
    assert client.pull(FAR).status == "success"
    assert len(place.hub.asked) == asked  # it is here
    assert client.chat(FAR, HI, options={"num_predict": 2}).message.content

    assert "right `control`" in refused(lambda: client.delete(FAR), 403)
    assert ops.delete(FAR).status == "success"  # it was loaded, but idle
    assert place.files() == []
    assert names(client) == {"tiny:latest"}


def test_model_that_was_found_in_its_folder_is_deleted(start: Start) -> None:
    place = start()
    ops = place.connect("ops")
    ops.pull("hf.co/org/far:latest")
    found = "far-Q4_K_M:latest"
    eventually(lambda: found in names(ops))
    assert ops.pull(found).status == "success"
    assert ops.delete(found).status == "success"
    assert place.files() == []
    assert names(ops) == {"tiny:latest"}  # also without the name that was pulled


def test_only_models_of_the_config_are_pulled_without_downloads_on_demand(start: Start) -> None:
    place = start(on_demand=False, named={"repo": "org/far:Q4_K_M"})
    place.hub.repos["org/other"] = {"other-Q4_K_M.gguf": tiny_decoder()}
    client = place.connect("ops")
    assert "downloads.on_demand" in refused(lambda: client.pull("hf.co/org/other"), 403)
    assert place.hub.asked == []
    assert client.pull("named").status == "success"
    assert client.delete("named").status == "success"
    assert place.files() == []
    assert client.chat("named", HI, options={"num_predict": 2}).done  # it is downloaded again


def test_refused_pulls_and_deletions(start: Start) -> None:
    place = start()
    client, few, ops = (place.connect(key) for key in ("any", "few", "ops"))
    for stream in (False, True):
        assert "hf.co/ORG/REPO" in refused(lambda stream=stream: client.pull("llama3.2", stream=stream), 404)  # type: ignore[misc]
    for name in ("hf.co/org", "https://hf.co/org/far?x=1", "org/far:sub dir/x.gguf"):
        assert "hf.co/ORG/REPO" in refused(lambda name=name: client.pull(name), 404)  # type: ignore[misc]
    assert "may not use" in refused(lambda: few.pull(FAR), 403)
    assert "insecure" in refused(lambda: client.pull(FAR, insecure=True), 400)
    assert few.pull("tiny").status == "success"
    assert "right `control`" in refused(lambda: few.delete("tiny"), 403)
    assert "the config names its file" in refused(lambda: ops.delete("tiny"), 409)
    assert "does not exist" in refused(lambda: ops.delete("nope"), 404)
    assert place.hub.asked == []

    assert "does not exist or is private" in refused(lambda: client.pull("hf.co/org/none"), 404)
    with pytest.raises(ResponseError, match="does not exist or is private"):
        list(client.pull("hf.co/org/none", stream=True))
    place.hub.faults.append(Fault(FILE, times=100, change=lambda content: content[:-1] + b"?"))
    assert "checksum" in refused(lambda: client.pull(FAR), 503)
    assert place.files() == []
    assert str(place.folder) not in refused(lambda: client.pull(FAR), 503)


def test_download_ends_with_its_client_and_is_continued(start: Start) -> None:
    place = start()
    client = place.connect("any")
    place.hub.faults.append(Fault(FILE, hold_after=300_000, only_parts=True))
    lines = client.pull(FAR, stream=True)
    next(lines)
    assert place.hub.held.wait(PATIENCE_S)
    part = place.file.with_name(f"{FILE}.part")
    eventually(part.exists)
    lines.close()  # type: ignore[attr-defined]
    eventually(lambda: part.with_name(f"{part.name}.json").exists())  # what is saved at its end
    place.hub.released.set()
    assert client.pull(FAR).status == "success"
    assert place.file.read_bytes() == tiny_decoder()


def test_only_model_of_run_is_here_and_stays(serve: Any, tiny_model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    serve(tiny_model, f"--ollama={address}")
    with Client(f"http://{address}", headers={"Authorization": "Bearer sk-of-the-clients"}) as client:
        (own,) = client.list().models
        assert client.pull(own.model or "").status == "success"
        assert "Served here" in refused(lambda: client.pull(FAR), 404)
        assert "right `control`" in refused(lambda: client.delete(own.model or ""), 403)


def test_package_of_npm_pulls_and_deletes(ollama_js: OllamaJs, start: Start) -> None:
    place = start()
    streamed, again, refusal, deleted = ollama_js(
        place.url,
        "sk-ops",
        ["pull", {"model": FAR, "stream": True}],
        ["pull", {"model": FAR}],
        ["pull", {"model": "llama3.2", "stream": True}],
        ["delete", {"model": FAR}],
    )
    first, *lines, last = streamed["pieces"]
    assert (first["status"], last["status"]) == ("pulling manifest", "success")
    assert {line["total"] for line in lines} == {len(tiny_decoder())}
    assert again["answer"] == deleted["answer"] == {"status": "success"}
    assert (refusal["error"], refusal["status"]) == ("ResponseError", 404)
    assert place.files() == []
