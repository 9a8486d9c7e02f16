"""llama.cpp's router API: a real router and llamasup get the same requests, and their answers are compared.

Where they differ on purpose, the table says so. Then who may use the API, and what no web page reaches.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.driver import llamasup, started
from tests.kit.gguf_writer import write_gguf
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.tiny import tiny_decoder, tiny_keys, tiny_tensors
from tests.real.bare_server import bare_server
from tests.real.remains import folders_of

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def broken_decoder() -> bytes:
    """A decoder that llama-server refuses, because a tensor is missing."""
    return write_gguf(tiny_keys(), tiny_tensors()[1:])


MODELS = {"alpha": tiny_decoder, "beta": tiny_decoder, "broken": broken_decoder}


@contextmanager
def events_of(client: httpx.Client, **headers: str) -> Iterator[Callable[[str, str], list[Any]]]:
    """Give the events of a model until this status, in order."""
    found: queue.Queue[Any] = queue.Queue()
    with client.stream("GET", "/models/sse", headers=headers, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")

        def read() -> None:
            try:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        found.put(json.loads(line[6:]))
            except (httpx.HTTPError, httpx.StreamError):
                pass

        reading = threading.Thread(target=read, daemon=True)
        reading.start()

        def until(model: str, status: str) -> list[Any]:
            seen = []
            while True:
                event = found.get(timeout=PATIENCE_S)
                if event["model"] == model:
                    seen.append(event)
                    if event["data"]["status"] == status:
                        return seen

        yield until


class Pair(NamedTuple):
    router: httpx.Client
    ours: httpx.Client

    @property
    def both(self) -> tuple[httpx.Client, httpx.Client]:
        return self.router, self.ours


@contextmanager
def served(home: Path, runtime: str, *, keys: str = "", **settings: Any) -> Iterator[httpx.Client]:
    folder = home / "models"
    folder.mkdir(exist_ok=True)
    for name, content in MODELS.items():
        (folder / f"{name}.gguf").write_bytes(content())
    models = {name: {"path": str(folder / f"{name}.gguf"), "ctx_size": 512, "parallel": 1} for name in MODELS}
    config = {"listen": "127.0.0.1:0", "runtime": runtime, "models": models, **settings}
    if keys:
        (home / "keys").write_text(keys)
        (home / "keys").chmod(0o600)
        config["auth"] = {"api_key_file": str(home / "keys")}
    (home / "config.yaml").write_text(json.dumps(config))
    env = {**os.environ, **folders_of(home)}
    with (
        started("serve", "--config", str(home / "config.yaml"), env=env) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        yield client
        assert running.stop() == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, llama_server: str) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("r")  # short: sockets lie below it
    socket = home / "router.sock"
    with served(home, llama_server, router={"inference_keys": True}) as ours:
        options = ("--models-dir", str(home / "models"), "--ctx-size", "512", "--parallel", "1")
        transport = httpx.HTTPTransport(uds=str(socket))
        with (
            bare_server(llama_server, socket, *options),
            httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as router,
        ):
            yield Pair(router, ours)


def status_of(client: httpx.Client, model: str) -> str:
    listed = {each["id"]: each["status"]["value"] for each in client.get("/models").json()["data"]}
    return str(listed[model])


@pytest.fixture
def unloaded(pair: Pair) -> Pair:
    for client in pair.both:
        for model in ("alpha", "beta"):
            if status_of(client, model) != "unloaded":
                client.post("/models/unload", json={"model": model})
            eventually(lambda client=client, model=model: status_of(client, model) == "unloaded")  # type: ignore[misc]
    return pair


def error_of(answer: httpx.Response) -> Mapping[str, Any]:
    """The fields of the router's errors. llamasup adds the cause and the remedy."""
    error = answer.json()["error"]
    return {name: error[name] for name in ("code", "message", "type")}


REFUSED: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/models/unload", {"model": "nope"}),
    ("POST", "/models/unload", {"model": "beta"}),
    ("POST", "/models/unload", {}),
    ("GET", "/props?model=beta&autoload=false", None),
    ("GET", "/props?model=beta&autoload=0", None),
    ("GET", "/props?autoload=no&model=broken", None),
    ("POST", "/v1/chat/completions?autoload=false", {"model": "beta", **CHAT}),
)


@pytest.mark.parametrize(("method", "path", "body"), REFUSED)
def test_refusals_are_those_of_a_router(unloaded: Pair, method: str, path: str, body: Any) -> None:
    router, ours = (client.request(method, path, json=body) for client in unloaded.both)
    assert router.status_code == ours.status_code == 400
    assert error_of(router) == error_of(ours)


# An error handler replaces the router's text of each 404, "model is not found".
ON_PURPOSE: tuple[tuple[str, str, bytes, int, int, str], ...] = (
    ("POST", "/models/load", b'{"model":"nope"}', 404, 404, "model is not found"),
    ("POST", "/models/load", b"{}", 404, 404, "model is not found"),
    ("POST", "/models/load", b'{"model":5}', 404, 404, "model is not found"),
    ("POST", "/models/load", b"x", 500, 400, "The body is not the JSON of this request"),
    ("POST", "/models/unload", b"", 500, 400, "The body is not the JSON of this request"),
    ("GET", "/models/load", b"", 404, 405, "this path needs another method"),
    ("GET", "/props?model=nope", b"", 400, 404, "The model 'nope' does not exist"),
)


@pytest.mark.parametrize(("method", "path", "body", "theirs", "status", "message"), ON_PURPOSE)
def test_differences_are_on_purpose(
    pair: Pair, method: str, path: str, body: bytes, theirs: int, status: int, message: str
) -> None:
    router, ours = (client.request(method, path, content=body) for client in pair.both)
    assert (router.status_code, ours.status_code) == (theirs, status)
    assert message in ours.json()["error"]["message"]


def shape(value: Any) -> Any:
    """The keys and types of JSON."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def without(listed: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only the router has: paths of the machine, and a number of its library."""
    status = {name: value for name, value in listed["status"].items() if name != "preset"}
    meta = {name: value for name, value in listed.get("meta", {}).items() if name != "vocab_type"}
    return {**listed, "status": {**status, "args": []}, "meta": meta}


def missing(theirs: Any, ours: Any, at: str = "") -> list[str]:
    """The places where ours lacks a key, or has another type."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            place
            for name, value in theirs.items()
            for place in (
                [f"{at}.{name}"] if name not in ours else missing(value, ours[name], f"{at}.{name}")
            )
        ]
    return [] if shape(theirs) == shape(ours) else [f"{at}: {theirs!r}, {ours!r}"]


def test_load_and_unload_have_the_answers_and_events_of_a_router(unloaded: Pair) -> None:
    seen = []
    for client in unloaded.both:
        with events_of(client) as until:
            begun = client.post("/models/load", json={"model": "alpha", "extra_args": ["--port", "1"]})
            again = client.post("/models/load", json={"model": "alpha"})
            loading = until("alpha", "loaded")
            third = client.post("/models/load", json={"model": "alpha"})
            (listed,) = (each for each in client.get("/models").json()["data"] if each["id"] == "alpha")
            props = client.get("/props?model=alpha&autoload=false")
            chat = client.post("/v1/chat/completions?autoload=false", json={"model": "alpha", **CHAT})
            ended = client.post("/models/unload", json={"model": "alpha"})
            unloading = until("alpha", "unloaded")
        assert begun.json() == ended.json() == {"success": True}
        assert error_of(again) == error_of(third)
        assert props.json()["model_alias"] == "alpha"
        assert chat.status_code == 200
        seen.append((error_of(third), listed, loading, unloading))
    (their_error, theirs, their_load, their_unload), (our_error, ours, our_load, our_unload) = seen
    assert our_error == their_error
    assert missing(without(theirs), without(ours)) == []
    assert our_unload[-1] == their_unload[-1]
    (their_last, our_last) = (events.pop() for events in (their_load, our_load))
    # A router reports the progress as often as it likes; ours is that of the whole load.
    assert [
        event for event in our_load if event["data"].get("progress", {}).get("value") in (None, 0.0, 1.0)
    ] == [event for event in their_load if event["data"].get("progress", {}).get("value") in (None, 0.0, 1.0)]
    their_info, our_info = (last["data"].pop("info") for last in (their_last, our_last))
    assert our_last == their_last
    del their_info["meta"]["vocab_type"]
    assert missing({**their_info, "aliases": []}, our_info) == []


def test_failed_load_has_the_outcome_of_a_router(pair: Pair) -> None:
    found = []
    for client in pair.both:
        with events_of(client) as until:
            assert client.post("/models/load", json={"model": "broken"}).json() == {"success": True}
            last = until("broken", "unloaded")[-1]
            eventually(lambda client=client: "exit_code" in broken_in(client))  # type: ignore[misc]
            status = broken_in(client)
        assert status["value"] == "unloaded"
        assert status["failed"] is True
        assert status["exit_code"] != 0
        assert last["data"]["exit_code"] != 0
        found.append(last["event"])
    assert found[0] == found[1]


def broken_in(client: httpx.Client) -> Any:
    (found,) = (each["status"] for each in client.get("/models").json()["data"] if each["id"] == "broken")
    return found


def test_props_have_the_role_and_the_fields_of_a_router(pair: Pair) -> None:
    router, ours = (client.get("/props?autoload=false").json() for client in pair.both)
    assert router["role"] == ours["role"] == "router"
    router["default_generation_settings"]["params"] = {}  # null in llama.cpp
    assert missing(router, ours) == []
    assert list(router) == list(ours)


def test_a_hundred_loads_and_unloads_leave_a_model_that_serves(pair: Pair) -> None:
    ours = pair.ours
    statuses = set()
    with events_of(ours) as until:
        for number in range(100):
            path = "/models/unload" if number % 2 else "/models/load"
            statuses.add(ours.post(path, json={"model": "alpha"}).status_code)
        ours.post("/models/load", json={"model": "alpha"})
        assert ours.post("/v1/chat/completions", json={"model": "alpha", **CHAT}).status_code == 200
        until("alpha", "loaded")
    assert statuses <= {200, 400}


# --- clients ------------------------------------------------------------------------------------------


def test_eject_button_of_open_webui_unloads_a_model(unloaded: Pair) -> None:
    """Its version 0.12.4 sends these to a connection with the provider `llama.cpp`."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    for client in unloaded.both:
        assert client.post("/v1/chat/completions", json={"model": "alpha", **CHAT}).status_code == 200
        listed = client.get("/v1/models", headers=headers).json()["data"]
        shows_eject = [each["id"] for each in listed if each["status"]["value"] in ("loaded", "sleeping")]
        assert shows_eject == ["alpha"]
        answer = client.post("/models/unload", json={"model": "alpha"}, headers=headers)
        assert answer.json() == {"success": True}
        eventually(lambda client=client: status_of(client, "alpha") == "unloaded")  # type: ignore[misc]


# --- access -------------------------------------------------------------------------------------------

KEYS = """
infer-key name=infer
some-key name=some models=al*
ops-key name=ops rights=control
both-key name=both rights=inference,control models=alpha
slow-key name=slow rpm=1
"""


def bearer(key: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.check("X4", "403")
def test_only_keys_with_control_load_models_by_default(tmp_path: Path, llama_server: str) -> None:
    with served(tmp_path, llama_server, keys=KEYS) as client:
        wanted = {"json": {"model": "beta"}}
        for key, status in {"infer-key": 403, "some-key": 403, "": 401, "wrong": 401}.items():
            headers = bearer(key) if key else {}
            for path in ("/models/load", "/models/unload"):
                answer = client.post(path, headers=headers, **wanted)  # type: ignore[arg-type]
                assert answer.status_code == status, answer.text
            assert client.get("/models/sse", headers=headers).status_code == status
        refusal = client.post("/models/load", headers=bearer("infer-key"), **wanted)  # type: ignore[arg-type]
        assert "router: {inference_keys: true}" in refusal.json()["error"]["remedy"]
        with events_of(client, **bearer("ops-key")) as until:
            assert client.post("/models/load", headers=bearer("ops-key"), **wanted).status_code == 200  # type: ignore[arg-type]
            until("beta", "loaded")
            # The control API does not know the limit to some models.
            assert client.post("/models/unload", headers=bearer("both-key"), **wanted).status_code == 200  # type: ignore[arg-type]
            until("beta", "unloaded")
            # Any key may request a load with a chat, so a GET with a key may also wait for one.
            path = "/props?model=alpha"
            assert client.get(path, headers=bearer("infer-key")).status_code == 503
            answer = client.get(f"{path}&autoload=true", headers=bearer("infer-key"))
            assert answer.json()["model_alias"] == "alpha"


@pytest.mark.check("X4", "403")
def test_key_for_some_models_loads_and_sees_only_these(tmp_path: Path, llama_server: str) -> None:
    settings = {"router": {"inference_keys": True}, "virtual_models": {"other": {"model": "alpha"}}}
    with served(tmp_path, llama_server, keys=KEYS, **settings) as client:
        with (
            events_of(client, **bearer("some-key")) as seen,
            events_of(client, **bearer("infer-key")) as until,
        ):
            for model in ("beta", "nope", "", "other"):
                answer = client.post("/models/load", json={"model": model}, headers=bearer("some-key"))
                assert answer.status_code == 403, answer.text
            for model in ("beta", "alpha"):
                answer = client.post("/models/load", json={"model": model}, headers=bearer("infer-key"))
                assert answer.json() == {"success": True}
                until(model, "loaded")
            answer = client.post("/models/unload", json={"model": "ALPHA"}, headers=bearer("some-key"))
            assert answer.json() == {"success": True}
            assert {event["model"] for event in seen("alpha", "unloaded")} == {"alpha"}
            unknown = client.post("/models/load", json={"model": "other"}, headers=bearer("infer-key"))
            assert unknown.status_code == 409, unknown.text
        assert client.post("/models/load", json={"model": "alpha"}).status_code == 401
        slow = [client.post("/models/unload", json={}, headers=bearer("slow-key")) for _ in range(2)]
        assert [answer.status_code for answer in slow] == [400, 429]


@pytest.mark.check("X3", "403")
def test_page_of_another_site_loads_and_unloads_nothing(tmp_path: Path, llama_server: str) -> None:
    """Also not with a GET, which a browser sends without an Origin. Its key is in no page."""
    with served(tmp_path, llama_server, router={"inference_keys": True}) as client:
        for origin in ("http://evil.example", "null", "http://localhost:1"):
            for path in ("/models/load", "/models/unload"):
                answer = client.post(path, json={"model": "alpha"}, headers={"origin": origin})
                assert answer.status_code == 403, answer.text
            assert client.get("/models/sse", headers={"origin": origin}).status_code == 403
        assert client.post("/models/load", headers={"host": "evil.example"}).status_code == 403
        for path in ("/models/load?model=alpha", "/models/unload?model=alpha"):
            assert client.get(path).status_code == 405
        assert client.get("/props?model=alpha&autoload=true").status_code == 503
        assert status_of(client, "alpha") == "unloaded"
        own = str(client.base_url).rstrip("/")
        assert client.post("/models/load", json={"model": "alpha"}, headers={"origin": own}).is_success


def test_without_keys_the_api_is_closed_unless_the_config_opens_it(tmp_path: Path, llama_server: str) -> None:
    with served(tmp_path, llama_server) as client:
        refused = client.post("/models/load", json={"model": "alpha"})
        assert refused.status_code == 403
        assert refused.json()["error"]["cause"] == "control_closed"
        assert "inference_keys" in refused.json()["error"]["remedy"]
        assert client.get("/models/sse").status_code == 403


def test_one_client_leaves_streams_to_others(tmp_path: Path, llama_server: str) -> None:
    with served(tmp_path, llama_server, keys=KEYS, router={"inference_keys": True}) as client:
        opened = [events_of(client, **bearer("infer-key")) for _ in range(8)]
        for each in opened:
            each.__enter__()
        assert client.get("/models/sse", headers=bearer("infer-key")).status_code == 429
        with events_of(client, **bearer("ops-key")):
            pass
        for each in opened:
            each.__exit__(None, None, None)
        eventually(lambda: opens(client))


def opens(client: httpx.Client) -> bool:
    with client.stream("GET", "/models/sse", headers=bearer("infer-key")) as answer:
        return answer.status_code == 200


def test_run_has_no_router(tmp_path: Path, tiny_model: Path, llama_server: str) -> None:
    with llamasup(
        tiny_model, "--runtime", llama_server, env={**os.environ, **folders_of(tmp_path)}
    ) as running:
        running.wait_for("ready")
        for path in ("/models/load", "/models/unload"):
            answer = httpx.post(f"{running.url}{path}", json={"model": "tiny"}, timeout=PATIENCE_S)
            assert answer.json()["error"]["cause"] == "closed_path"
        assert running.stop() == 0
