"""Several llamasup nodes that serve each other's models (docs/peers.md)."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.driver import llamasup
from tests.extended.real.nodes import KEY, Node, Nodes, nodes_in
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port
from tests.real.test_wrap import self_signed


@pytest.fixture
def nodes(runtime: str, tmp_path: Path) -> Iterator[Nodes]:
    with nodes_in(tmp_path, runtime) as started:
        yield started


def model(path: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(path), "ctx_size": 1024, "parallel": 2, "preload": True, **more}


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": "Once upon", "max_tokens": 24, "temperature": 0, "seed": 1, **more}


def test_models_of_another_node_are_listed_and_served(nodes: Nodes, tiny_model: Path) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model, aliases=["story"])})
    front = nodes.start("front", {}, nodes.peer(desk))
    assert front.ids() == ["tale"]
    with OpenAI(base_url=f"{front.url}/v1", api_key=KEY) as client:
        (listed,) = client.models.list().data
        assert listed.model_dump()["llamasup"]["nodes"] == ["desk"]
        answer = client.chat.completions.create(
            model="story", messages=[{"role": "user", "content": "Tell me."}], max_tokens=8
        )
        assert answer.choices[0].message.content
        stream = client.chat.completions.create(
            model="tale",
            messages=[{"role": "user", "content": "Tell me."}],
            max_tokens=8,
            stream=True,
        )
        assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1]
    for path, extra in (("/v1/completions", {}), ("/completion", {"n_predict": 24})):
        asked = body(model="tale", stream=True, **extra)
        with desk.client as direct, front.client as hop:
            one, two = (client.post(path, json=asked) for client in (direct, hop))
        assert unvaried(one.content) == unvaried(two.content)
        assert one.headers["content-type"] == two.headers["content-type"]
    status = front.node("desk")
    assert status["state"] == "ready"
    assert [each["id"] for each in status["models"]] == ["tale"]


def unvaried(stream: bytes) -> list[str]:
    """The events without what differs between two requests: ids, times, and what the cache had."""
    text = re.sub(
        r'"(?:id|created|timings|id_slot|prompt_tokens_details|tokens_cached|cached_tokens)":'
        r'(?:"[^"]*"|\{[^}]*\}|[\d.]+)',
        "",
        stream.decode(),
    )
    return text.splitlines()


def test_conversation_stays_on_the_node_that_has_it_in_its_cache(nodes: Nodes, tiny_model: Path) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model)})
    shelf = nodes.start("shelf", {"tale": model(tiny_model)})
    front = nodes.start("front", {}, nodes.peer(desk, shelf))
    for name in ("desk", "shelf"):
        front.until(name, "ready")
    stories = {number: f"Story {number}: " + f"once {number} upon a time " * 12 for number in range(4)}
    cached = prompt = 0
    for turn in range(3):
        for number, story in stories.items():
            story += f"and then {turn} "
            stories[number] = story
            usage = front.ask("tale", story).json()["usage"]
            if turn:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                prompt += usage["prompt_tokens"]
    assert cached / prompt > 0.8
    used = [desk.local("tale")["slots_busy"], shelf.local("tale")["slots_busy"]]
    assert used == [0, 0]
    counted = [requests_of(node) for node in (desk, shelf)]
    assert sum(counted) == 12
    assert min(counted) >= 3, counted  # new conversations spread over the nodes


def requests_of(node: Node) -> int:
    """The completions that the node has served."""
    with node.client as client:
        lines = client.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if 'route="/v1/completions"' in line))


def test_killed_node_loses_no_request_without_an_answer(nodes: Nodes, tiny_model: Path) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model)})
    shelf = nodes.start("shelf", {"tale": model(tiny_model)})
    front = nodes.start("front", {}, nodes.peer(desk, shelf))
    for name in ("desk", "shelf"):
        front.until(name, "ready")
    half = threading.Event()
    done: list[tuple[int, str]] = []

    def ask(number: int) -> None:
        answer = front.ask("tale", f"{number} once", max_tokens=64, ignore_eos=True)
        done.append((answer.status_code, answer.text))
        if len(done) >= 20:
            half.set()

    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask, number) for number in range(60)]
        assert half.wait(PATIENCE_S)
        children = desk.process.children()
        desk.process.send_signal(signal.SIGKILL)
        for one in asked:
            one.result()
    # A plain answer begins only when it is complete, so each of these could be sent again.
    assert [status for status, _ in done] == [200] * 60, [text for status, text in done if status != 200][:3]
    front.until("desk", "absent")
    assert front.ids() == ["tale"]
    eventually(lambda: not any(child.is_running() for child in children))


def test_stream_of_a_killed_node_ends_with_an_error_event(nodes: Nodes, tiny_model: Path) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model, ctx_size=32_768, parallel=1)})
    front = nodes.start("front", {}, nodes.peer(desk))
    front.until("desk", "ready")
    with front.client as client:
        asked = body(model="tale", stream=True, max_tokens=30_000, ignore_eos=True)
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            received = b""
            with pytest.raises(httpx.RemoteProtocolError):
                for piece in answer.iter_raw():
                    if not received:
                        desk.process.send_signal(signal.SIGKILL)
                    received += piece
    assert b'"error"' in received.splitlines()[-2] or b'"error"' in received.splitlines()[-1]
    assert b"the node 'desk'" in received or b"The node 'desk'" in received


def test_stopped_node_is_left_out_and_comes_back_by_itself(nodes: Nodes, tiny_model: Path) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model), "own": model(tiny_model)})
    shelf = nodes.start("shelf", {"tale": model(tiny_model)})
    front = nodes.start("front", {}, nodes.peer(desk, shelf))
    for name in ("desk", "shelf"):
        front.until(name, "ready")
    desk.process.send_signal(signal.SIGSTOP)
    try:
        assert "no answer" in front.until("desk", "silent")["reason"]
        for number in range(4):
            assert front.ask("tale", f"{number}").status_code == 200
        front.until("desk", "absent")
        assert requests_of(shelf) == 4
        # A model of this node alone: the request waits until it is back.
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(front.ask, "own")
            eventually(lambda: queued(front, "own") == 1, every_s=0.02)
            desk.process.send_signal(signal.SIGCONT)
            assert waiting.result().status_code == 200
    finally:
        desk.process.send_signal(signal.SIGCONT)
    front.until("desk", "ready")


def queued(node: Node, model: str) -> int:
    with node.client as client:
        live = client.get("/llamasup/v1/requests").json()["live"]
    return sum(request["model"] == model and request["phase"] in ("queued", "loading") for request in live)


def test_model_whose_nodes_cannot_be_reached_is_refused_when_the_wait_is_over(
    nodes: Nodes, tiny_model: Path
) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model)})
    front = nodes.start("front", {}, nodes.peer(desk), models_dir=str(tiny_model.parent))
    front.until("desk", "ready")
    desk.process.stop()
    front.until("desk", "absent")
    with front.client as client:
        answer = client.get("/props", params={"model": "tale"})  # it does not wait
    assert answer.status_code == 503
    assert answer.json()["error"]["cause"] == "node_absent"
    assert int(answer.headers["retry-after"]) >= 1
    assert "desk" in answer.json()["error"]["message"]


def test_first_request_loads_the_model_on_one_node(nodes: Nodes, tiny_model: Path) -> None:
    cold = model(tiny_model, preload=False)
    desk = nodes.start("desk", {"tale": cold})
    shelf = nodes.start("shelf", {"tale": cold})
    front = nodes.start("front", {}, nodes.peer(desk, shelf))
    for name in ("desk", "shelf"):
        front.until(name, "ready")
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda number: front.ask("tale", f"{number}"), range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    states = sorted(node.local("tale")["state"] for node in (desk, shelf))
    assert states == ["ready", "stopped"]


def test_own_model_is_used_first_and_that_of_another_node_when_it_is_busy(
    nodes: Nodes, tiny_model: Path
) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model)})
    front = nodes.start("front", {"tale": model(tiny_model, parallel=1)}, nodes.peer(desk))
    front.until("desk", "ready")
    assert front.ask("tale").status_code == 200
    assert requests_of(desk) == 0
    pid = front.local("tale")["pid"]
    with ThreadPoolExecutor(2) as clients:
        os.kill(pid, signal.SIGSTOP)  # so that its only slot stays busy
        try:
            busy = clients.submit(front.ask, "tale")
            eventually(lambda: front.local("tale")["slots_busy"] == 1, every_s=0.02)
            assert front.ask("tale").status_code == 200
            assert requests_of(desk) == 1
            assert "another node has a free slot" in " ".join(front.why("tale")["sentences"])
            desk.process.send_signal(signal.SIGKILL)
            front.until("desk", "absent")
            waiting = clients.submit(front.ask, "tale")  # here, as no other node is left
            eventually(lambda: queued(front, "tale") == 1, every_s=0.02)
        finally:
            with suppress(ProcessLookupError):  # llamasup restarts a server that has hung for 16 s
                os.kill(pid, signal.SIGCONT)
        assert [busy.result().status_code, waiting.result().status_code] == [200, 200]


@pytest.mark.one_runtime
def test_nodes_that_name_each_other_forward_a_request_once(nodes: Nodes, tiny_model: Path) -> None:
    ports = free_port(), free_port()
    key = str(nodes.key_file("both", KEY))
    url = [f"http://127.0.0.1:{port}" for port in ports]
    left = nodes.start(
        "left", {"a": model(tiny_model)}, {"right": {"url": url[1], "key_file": key}}, port=ports[0]
    )
    right = nodes.start(
        "right",
        {"b": model(tiny_model)},
        {"left": {"url": url[0], "key_file": key}, "me": {"url": url[1], "key_file": key}},
        port=ports[1],
    )
    left.until("right", "ready")
    right.until("left", "ready")
    assert right.until("me", "self")["remedy"] == "Remove it from peers."
    for node in (left, right):
        assert node.ids() == ["a", "b"]
        assert [node.ask(name).status_code for name in ("a", "b")] == [200, 200]
    # A forwarded request for a model that the node does not have goes no further.
    with left.client as client:
        asked = {"model": "b", "prompt": "x"}
        answer = client.post("/v1/completions", json=asked, headers={"X-Llamasup-Node": "other"})
    assert (answer.status_code, answer.json()["error"]["cause"]) == (404, "model_not_found")


def leave_early(node: Node) -> None:
    """Begin a stream, and disconnect at its first bytes."""
    asked = body(model="tale", stream=True, max_tokens=900, ignore_eos=True)
    with node.client as client, client.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_raw())


def test_disconnect_of_a_client_frees_the_slot_on_the_node(nodes: Nodes, tiny_model: Path) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model)})
    front = nodes.start("front", {}, nodes.peer(desk))
    front.until("desk", "ready")
    for _ in range(4):
        leave_early(front)
    assert front.ask("tale").status_code == 200
    eventually(lambda: desk.local("tale")["slots_busy"] == 0, every_s=0.02)
    eventually(lambda: front.node("desk")["in_flight"] == 0, every_s=0.02)


@pytest.mark.one_runtime
def test_llamasup_run_can_be_a_node(nodes: Nodes, runtime: str, tiny_model: Path) -> None:
    keys = nodes.key_file("run", f"{KEY} name=test rights=inference,control,node")
    options = ("--runtime", runtime, "--alias", "tale", "--ctx-size", "1024", "--api-key-file", str(keys))
    with llamasup(tiny_model, *options) as process:
        desk = Node("desk", process.url, process)
        front = nodes.start("front", {}, nodes.peer(desk))
        front.until("desk", "ready")
        assert front.ids() == ["tale"]
        assert front.ask("tale").status_code == 200


@pytest.mark.one_runtime
def test_certificate_and_key_of_a_node_are_checked(
    nodes: Nodes, tiny_model: Path, certificate: tuple[str, str], tmp_path: Path
) -> None:
    desk = nodes.start("desk", {"tale": model(tiny_model)}, tls=certificate)
    named = dict(nodes.peer(desk)["desk"])
    (tmp_path / "other").mkdir()
    _, other_ca = self_signed(tmp_path / "other")
    wrong_key = str(nodes.key_file("wrong", "sk-wrong"))
    front = nodes.start("front", {}, {"desk": named})
    front.until("desk", "ready")
    asked = body(model="tale", stream=True)
    with desk.client as direct, front.client as hop:
        one, two = (each.post("/v1/completions", json=asked) for each in (direct, hop))
    assert unvaried(one.content) == unvaried(two.content)
    with ThreadPoolExecutor(4) as clients:
        assert {answer.status_code for answer in clients.map(lambda _: front.ask("tale"), range(8))} == {200}
    for _ in range(4):  # more than the node has slots
        leave_early(front)
    assert front.ask("tale").status_code == 200
    eventually(lambda: desk.local("tale")["slots_busy"] == 0, every_s=0.02)
    refused = nodes.start("refused", {}, {"desk": {**named, "ca_file": str(other_ca)}})
    assert "certificate is not valid here" in refused.until("desk", "refused")["reason"]
    assert refused.ids() == []
    keyless = nodes.start("keyless", {}, {"desk": {**named, "key_file": wrong_key}})
    assert "does not accept our key" in keyless.until("desk", "refused")["reason"]
    assert keyless.ask("tale").status_code == 404
