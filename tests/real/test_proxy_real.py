"""A real llama-server gives the same answers directly and through the proxy."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httptools
import httpx
import pytest

from llamasup.core.llama_server.token_counts import TokenCounts
from llamasup.core.proxy import ProxyConfig
from tests.core.proxy.rig import PATIENCE_S, Rig, Wire, get, post
from tests.real.bare_server import bare_server

_VARIES = re.compile(
    rb'"(?:id|created|created_at|completed_at|[a-z_]+_ms|[a-z_]+_per_second|t_[a-z_]+)":\s*'
    rb'(?:"[^"]*"|[-0-9.e+]+)'
)
SAMPLING = b'"temperature":0,"seed":1,"cache_prompt":false,"max_tokens":32,"n_predict":32'
CHAT = b'{"messages":[{"role":"user","content":"Tell me."}],' + SAMPLING + b"}"


@pytest.fixture(scope="module")
def server(llama_server: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Unix socket of a real llama-server that is ready."""
    folder = tmp_path_factory.mktemp("server")
    path = folder / "s.sock"
    with bare_server(
        llama_server, path, "--model", str(tiny_model), "--ctx-size", "65536", "--parallel", "2"
    ):
        yield str(path)


@pytest.fixture
def front(server: str, tmp_path: Path, loop_name: str) -> Iterator[Rig]:
    rig = Rig(tmp_path, loop_name, ProxyConfig(), child_path=server)
    yield rig
    rig.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def connect_directly(server: str) -> Wire:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(server)
    return Wire(sock)


class Response:
    """One complete response. ``sizes``: the length of its body after each chunk."""

    def __init__(self, wire: Wire, request: bytes) -> None:
        self.body = b""
        self.sizes: list[int] = []
        self._complete = False
        parser = httptools.HttpResponseParser(self)
        wire.send(request)
        head = wire.head()
        parser.feed_data(head)
        self.status = parser.get_status_code()
        while not self._complete:
            parser.feed_data(wire.receive(1))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_chunk_header(self) -> None:
        self.sizes.append(len(self.body))

    def on_message_complete(self) -> None:
        self._complete = True

    def without_ids_and_times(self) -> bytes:
        return _VARIES.sub(b"", self.body)


@pytest.mark.parametrize(
    "request_",
    [
        post(b"/v1/chat/completions", CHAT),
        post(b"/v1/chat/completions", CHAT[:-1] + b',"stream":true,"stream_options":{"include_usage":true}}'),
        post(b"/completion", b'{"prompt":"a",' + SAMPLING + b"}"),
        post(b"/completion", b'{"prompt":"a","stream":true,' + SAMPLING + b"}"),
        post(b"/v1/completions", b'{"prompt":"a","stream":true,' + SAMPLING + b"}"),
        post(b"/tokenize", b'{"content":"some words"}'),
        post(b"/v1/chat/completions", b"no json"),
        get(b"/props"),
        get(b"/v1/models"),
        get(b"/no-such-path"),
    ],
    ids=lambda request_: request_.partition(b" HTTP")[0].decode(),
)
def test_answers_are_the_same_directly_and_through_the_proxy(
    front: Rig, server: str, request_: bytes
) -> None:
    wire = connect_directly(server)
    direct = Response(wire, request_)
    wire.close()
    proxied = Response(front.connect(), request_)
    assert proxied.status == direct.status
    assert proxied.without_ids_and_times() == direct.without_ids_and_times()
    assert len(proxied.sizes) == len(direct.sizes)  # the proxy neither joins nor splits chunks


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/chat/completions", CHAT),
        (b"/completion", b'{"prompt":"some words",' + SAMPLING + b"}"),
        (b"/v1/messages", CHAT),
        (b"/v1/responses", b'{"input":"some words","max_output_tokens":8,"temperature":0}'),
    ],
)
def test_tokens_of_a_real_answer_are_counted(front: Rig, path: bytes, body: bytes, stream: bytes) -> None:
    Response(front.connect(), post(path, body[:-1] + b',"stream":' + stream + b"}"))
    record = front.record()
    counts = TokenCounts(record.tokens_prompt, record.tokens_cached, record.tokens_completion)
    assert (record.status, record.outcome) == (200, "ok")
    assert counts.completion, counts
    assert counts.prompt, counts


@pytest.mark.contract
def test_disconnect_of_a_client_frees_the_slot(front: Rig, server: str) -> None:
    client = front.connect()
    client.send(post(b"/completion", b'{"prompt":"a","stream":true,"ignore_eos":true,"n_predict":60000}'))
    client.until(b"data: ")
    client.close()
    assert front.record().outcome == "client_gone"
    with httpx.Client(transport=httpx.HTTPTransport(uds=server), base_url="http://localhost") as probe:
        deadline = time.monotonic() + PATIENCE_S
        while any(slot["is_processing"] for slot in probe.get("/slots").json()):
            assert time.monotonic() < deadline, "the slot is still busy"
