"""A llamasup for each kind of model, with a key, on each runtime; shared by all clients that talk to it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.models import tool_caller
from tests.e2e.driver import Llamasup, llamasup
from tests.kit.models import tiny_encoder
from tests.kit.patience import PATIENCE_S as PATIENCE_S
from tests.kit.ports import free_port
from tests.kit.runtimes import wrapped_runtime
from tests.real.remains import folders_of

KEY = "sk-of-the-clients"
PAGE = "http://page.example:3000"
"""The origin of a web page that is allowed to call."""
OLLAMA_JS = "0.6.4"
"""The version of the npm package ``ollama``."""
LONG = 30_000
"""Tokens of an answer that a client abandons: it takes seconds and exceeds all buffers."""


@dataclass(frozen=True, slots=True)
class Served:
    """A llamasup that serves one model."""

    running: Llamasup
    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S)

    def direct(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer of the server itself, on its own socket."""
        (child,) = [process for process in self.running.children() if "--host" in process.cmdline()]
        words = child.cmdline()
        transport = httpx.HTTPTransport(uds=words[words.index("--host") + 1])
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as client:
            return client.post(path, json=dict(body)).raise_for_status().json()

    def tokens_predicted(self) -> float:
        """How many tokens of finished answers the server has counted."""
        lines = self.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("llamacpp:tokens_predicted_total{")]
        return float(line.rpartition(" ")[2])

    def wait_until_idle(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while any(slot["is_processing"] for slot in self.get("/slots").json()):
            assert time.monotonic() < deadline_s, "a slot is still busy"
            time.sleep(0.005)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some clients leave sockets to the garbage collector."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What the clients left is not collected in a test that does not expect it."""
    yield
    gc.collect()


@contextmanager
def frees_slot(served: Served) -> Iterator[None]:
    """Check that a client that disconnects in this block frees its slot before the end of its answer."""
    served.wait_until_idle()
    before = served.tokens_predicted()
    yield
    served.wait_until_idle()
    assert served.tokens_predicted() - before < LONG


Serve = Callable[..., Served]


@pytest.fixture(scope="package")
def serve(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start a llamasup with options, which ends with these tests: others count what is left behind."""
    opened = ExitStack()

    def start(model: Path, *options: str, runtime: str = runtime) -> Served:
        home = tmp_path_factory.mktemp("c")  # short: sockets lie below it
        keys = home / "keys"
        keys.write_text(f"{KEY}\n")
        keys.chmod(0o600)
        cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
        service = llamasup(
            model,
            *("--runtime", runtime, "--api-key-file", str(keys), "--allow-origin", PAGE, *options),
            env={**os.environ, **folders_of(home), **cache},
        )
        running = opened.enter_context(service)
        return Served(running, "" if "--port" in options else running.url)

    with opened:
        yield start


@pytest.fixture(scope="package")
def chat(serve: Serve, tiny_model: Path) -> Served:
    """The demo model: its answers are as long as the limit allows."""
    return serve(tiny_model, "--ctx-size", "32768", "--parallel", "4")


@pytest.fixture(scope="package")
def tools(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model that calls a tool whenever it may, and says what a schema allows."""
    path = tmp_path_factory.mktemp("models") / "caller.gguf"
    path.write_bytes(tool_caller())
    return serve(path, "--ctx-size", "4096", "--parallel", "2")


@pytest.fixture(scope="package")
def encoder(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = tmp_path_factory.mktemp("models") / "encoder.gguf"
    path.write_bytes(tiny_encoder())
    return serve(path)


@pytest.fixture(scope="package")
def slow_to_load(
    serve: Serve, runtime: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], tuple[Served, Callable[[], None]]]:
    """A llamasup without a queue, whose server loads only after a call, and the function for this call."""

    def start() -> tuple[Served, Callable[[], None]]:
        folder = tmp_path_factory.mktemp("slow")
        gate = folder / "gate"
        os.mkfifo(gate)
        wrapper = wrapped_runtime(folder, runtime, f'case "$*" in *--model*) read -r _ < {gate} ;; esac')
        port = free_port()
        served = serve(tiny_model, "--wait-timeout", "0", "--port", str(port), runtime=wrapper)
        served.running.wait_for("state", state="starting")

        def load() -> None:
            gate.write_text("load\n")

        return Served(served.running, f"http://127.0.0.1:{port}"), load

    return start


@pytest.fixture(scope="session")
def curl() -> str:
    return _program("curl")


@pytest.fixture(scope="session")
def node() -> str:
    return _program("node")


OllamaJs = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def ollama_js(tmp_path_factory: pytest.TempPathFactory) -> OllamaJs:
    """Calls the npm package ``ollama``, unchanged: gets URL, key and calls, and returns the results."""
    node, npm = _program("node"), _program("npm")
    folder = tmp_path_factory.mktemp("npm")
    package = f"ollama@{OLLAMA_JS}"
    options = ("--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund")
    done = subprocess.run([npm, "install", *options, package], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm cannot install {package}: {done.stderr.strip()[-300:]}")
    module = folder / "node_modules" / "ollama" / "dist" / "index.mjs"

    def call(url: str, key: str, *calls: Any) -> list[dict[str, Any]]:
        words = [node, str(Path(__file__).with_name("ollama.mjs")), module.as_uri(), url, key]
        done = subprocess.run(
            [*words, json.dumps(calls)], capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return found

    return call


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no {name} on PATH")
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client may contact other machines: only names of this machine are resolved."""
    real_getaddrinfo = socket.getaddrinfo

    def local_getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if host not in (None, "localhost", "127.0.0.1", "::1", b"127.0.0.1", b"localhost"):
            raise AssertionError(f"a client wants to reach {host!r}")
        return real_getaddrinfo(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", local_getaddrinfo)
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        for name in (variable, variable.lower()):
            monkeypatch.delenv(name, raising=False)
