"""Real llamasup nodes on loopback, each with its own llama-servers, as a config starts them."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.driver import Llamasup, started
from tests.kit.patience import PATIENCE_S, eventually

__all__ = ["KEY", "Node", "Nodes", "nodes_in"]

KEY = "sk-node-0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    url: str
    process: Llamasup
    ca: str = ""

    @property
    def client(self) -> httpx.Client:
        verify: Any = ssl.create_default_context(cafile=self.ca) if self.ca else False
        return httpx.Client(
            base_url=self.url, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {KEY}"}, verify=verify
        )

    def ids(self) -> list[str]:
        with self.client as client:
            return sorted(entry["id"] for entry in client.get("/v1/models").json()["data"])

    def status(self) -> Mapping[str, Any]:
        with self.client as client:
            return dict(client.get("/llamasup/v1/status").raise_for_status().json())

    def why(self, model: str) -> Mapping[str, Any]:
        with self.client as client:
            return dict(client.get(f"/llamasup/v1/models/{model}/why").raise_for_status().json())

    def node(self, name: str) -> Mapping[str, Any]:
        (found,) = (node for node in self.status()["nodes"] if node["name"] == name)
        return dict(found)

    def until(self, name: str, state: str) -> Mapping[str, Any]:
        """Wait until the node ``name`` is in this state for this one."""
        eventually(lambda: self.node(name)["state"] == state, f"{name} is {state}", every_s=0.02)
        return self.node(name)

    def local(self, model: str) -> Mapping[str, Any]:
        (found,) = (each for each in self.status()["models"] if each["id"] == model)
        return dict(found)

    def ask(self, model: str, prompt: str = "Once", **more: Any) -> httpx.Response:
        with self.client as client:
            return client.post(
                "/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 4, **more}
            )


class Nodes:
    """Starts nodes. ``models``: id → settings of a config, with ``path``."""

    def __init__(self, stack: ExitStack, folder: Path, runtime: str) -> None:
        self._stack = stack
        self._folder = folder
        self._runtime = runtime

    def start(
        self,
        name: str,
        models: Mapping[str, Mapping[str, Any]],
        peers: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        port: int = 0,
        tls: tuple[str, str] | None = None,
        **config: Any,
    ) -> Node:
        folder = self._folder / name
        folder.mkdir()
        keys = self.key_file(name, f"{KEY} name=test rights=inference,control,node")
        http = {} if tls is None else {"tls_cert": tls[0], "tls_key": tls[1]}
        text = {
            "listen": f"127.0.0.1:{port}",
            "models": models,
            "auth": {"api_key_file": str(keys)},
            "http": http,
            "peers": peers or {},
            **config,
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(text))
        process = self._stack.enter_context(
            started("serve", "--config", str(file), "--runtime", self._runtime)
        )
        url = process.url
        if tls is not None:
            url = url.replace("127.0.0.1", "localhost")
        return Node(name, url, process, ca="" if tls is None else tls[0])

    def key_file(self, name: str, text: str) -> Path:
        path = self._folder / f"{name}.key"
        path.write_text(f"{text}\n")
        path.chmod(0o600)
        return path

    def peer(self, *nodes: Node, **more: Any) -> Mapping[str, Mapping[str, Any]]:
        """The ``peers`` of a config that name these nodes."""
        key = str(self.key_file("peers", KEY))
        return {
            node.name: {
                "url": node.url,
                "key_file": key,
                **({"ca_file": node.ca} if node.ca else {}),
                **more,
            }
            for node in nodes
        }


@contextmanager
def nodes_in(folder: Path, runtime: str) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack, folder, runtime)


def events_of(content: bytes) -> Sequence[Mapping[str, Any]]:
    """The JSON of the server-sent events."""
    return [
        json.loads(line[6:])
        for line in content.decode().splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
