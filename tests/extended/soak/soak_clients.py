"""The kinds of requests in the soak: one function each, which also checks the answers.

Each request has its own text, and a grammar forces the server to answer with it. So a client detects an
incomplete answer, and an answer to another request.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from llamasup.core.proxy import Limits
from tests.extended.soak.soak_wire import Answer, Outcome, Wire, complete_text, outcome_of
from tests.kit.tiny import WORDS

__all__ = ["IDLE", "KINDS", "MAX_IDLE_S", "Client", "Kind", "Result"]

KEY = "soak-key"
KEEPALIVE_S = 75.0  # X8; a connection that has been idle for about this time may be closed or not
MAX_IDLE_S = 90.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one request."""

    outcome: Outcome
    detail: str = ""
    """What the client received, to explain a failure."""


@dataclass(frozen=True, slots=True)
class Client:
    port: int
    rng: random.Random = field(default_factory=random.Random)
    max_idle_s: float = MAX_IDLE_S

    def wire(self, *, small: bool = False) -> Wire:
        return Wire(self.port, small=small)

    def words(self, least: int, most: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(least, most)))


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    weight: int
    """The relative frequency."""
    send: Callable[[Client], Awaitable[list[Result]]]
    work: bool = True
    """Whether the request waits for its model. Other requests may get an error during a restart."""


def request(
    method: str, path: str, body: bytes = b"", *, key: str = KEY, headers: str = "", host: str = "localhost"
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n{headers}"
    if method == "POST":
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def post(path: str, body: Any, **options: str) -> bytes:
    return request("POST", path, json.dumps(body).encode(), **options)


def text_request(client: Client, text: str, *, stream: bool) -> bytes:
    """A request, in one of three APIs, whose only possible answer is ``text``."""
    common = {"grammar": f'root ::= "{text}"', "stream": stream, "max_tokens": 6 * len(text) + 10}
    match client.rng.randrange(3):
        case 0:
            return post("/completion", {"prompt": client.words(1, 40), **common})
        case 1:
            return post("/v1/completions", {"prompt": client.words(1, 40), **common})
        case _:
            messages = [{"role": "user", "content": client.words(1, 40)}]
            return post("/v1/chat/completions", {"messages": messages, **common})


def long_stream(n_predict: int) -> bytes:
    return post("/completion", {"prompt": "Once", "n_predict": n_predict, "ignore_eos": True, "stream": True})


def seen(answer: Answer, correct: bool) -> list[Result]:
    return [Result(outcome_of(answer, correct), str(answer))]


def said_all(answer: Answer, n_predict: int) -> bool:
    return bool(complete_text(answer)) and f'"tokens_predicted":{n_predict},'.encode() in answer.body


# --- whoever asks for something and takes the answer -----------------------------------------------------


async def plain(client: Client) -> list[Result]:
    text = client.words(1, 30)
    async with client.wire() as wire:
        await wire.send(text_request(client, text, stream=False))
        answer = await wire.answer()
    return seen(answer, complete_text(answer) == text)


async def stream(client: Client) -> list[Result]:
    text = client.words(3, 150)
    async with client.wire() as wire:
        await wire.send(text_request(client, text, stream=True))
        answer = await wire.answer()
    return seen(answer, complete_text(answer) == text)


async def long_answer(client: Client) -> list[Result]:
    n_predict = client.rng.randint(500, 3000)
    async with client.wire() as wire:
        await wire.send(long_stream(n_predict))
        answer = await wire.answer()
    return seen(answer, said_all(answer, n_predict))


async def slow_reader(client: Client) -> list[Result]:
    n_predict = client.rng.randint(1500, 3000)
    async with client.wire(small=True) as wire:
        await wire.send(long_stream(n_predict))
        answer = await wire.answer(step=4096, pause_s=client.rng.uniform(0.0, 0.03))
    return seen(answer, said_all(answer, n_predict))


async def slow_sender(client: Client) -> list[Result]:
    text = client.words(1, 30)
    message = text_request(client, text, stream=False)
    async with client.wire() as wire:
        for begin in range(0, len(message), 128):
            await wire.send(message[begin : begin + 128])
            await asyncio.sleep(client.rng.uniform(0.0, 0.4))
        answer = await wire.answer()
    return seen(answer, complete_text(answer) == text)


async def keep_alive(client: Client) -> list[Result]:
    results: list[Result] = []
    async with client.wire() as wire:
        for _ in range(client.rng.randint(2, 8)):
            text = client.words(1, 10)
            await wire.send(text_request(client, text, stream=client.rng.random() < 0.3))
            answer = await wire.answer()
            results += seen(answer, complete_text(answer) == text)
            if not answer.whole:
                break
            await asyncio.sleep(client.rng.uniform(0.0, 0.3))
    return results


async def pipelined(client: Client) -> list[Result]:
    """Sends all requests at once. No answer can follow one that was cut."""
    texts = [client.words(1, 10) for _ in range(client.rng.randint(2, 6))]
    results: list[Result] = []
    async with client.wire() as wire:
        await wire.send(b"".join(text_request(client, text, stream=False) for text in texts))
        for text in texts:
            answer = await wire.answer()
            results += seen(answer, complete_text(answer) == text)
            if not answer.whole:
                break
    return results


async def tokenize(client: Client) -> list[Result]:
    text = client.words(1, 60)
    async with client.wire() as wire:
        await wire.send(post("/tokenize", {"content": text}))
        answer = await wire.answer()
        tokens = (answer.json or {}).get("tokens") if answer.whole else None
        if not tokens:
            return seen(answer, False)
        await wire.send(post("/detokenize", {"tokens": tokens}))
        back = await wire.answer()
    return seen(answer, True) + seen(back, (back.json or {}).get("content", "").strip() == text)


async def big_body(client: Client) -> list[Result]:
    """Sends up to 1.5 MB and receives up to 7 MB: one token per letter.

    llamasup does not keep a body above 1 MiB, so it cannot send it again after a crash.
    """
    letters = client.rng.randint(100_000, 1_500_000)
    async with client.wire() as wire:
        await wire.send(post("/tokenize", {"content": "x" * letters}))
        answer = await wire.answer()
    if letters > Limits().replay_bytes and answer.status == 502:
        return [Result(Outcome.CUT)]
    tokens = (answer.json or {}).get("tokens") or [] if answer.whole else []
    return seen(answer, len(tokens) == letters and len(set(tokens)) == 1)


async def idle(client: Client) -> list[Result]:
    """Stays idle after an answer, sometimes for longer than the keep-alive timeout."""
    async with client.wire() as wire:
        await wire.send(request("GET", "/livez"))
        first = await wire.answer()
        quiet_s = client.rng.uniform(0.0, client.max_idle_s)
        await asyncio.sleep(quiet_s)
        text = client.words(1, 5)
        await wire.send(text_request(client, text, stream=False))
        second = await wire.answer()
    if quiet_s > KEEPALIVE_S - 2.0 and not second.status and not second.timed_out:
        return [*seen(first, True), Result(Outcome.REFUSED)]
    return seen(first, True) + seen(second, complete_text(second) == text)


# --- clients that disconnect -----------------------------------------------------------------------------


async def abandon_stream(client: Client) -> list[Result]:
    """Disconnects after any number of bytes, including none."""
    async with client.wire() as wire:
        await wire.send(long_stream(client.rng.randint(100, 3000)))
        await wire.read(client.rng.choice((0, client.rng.randrange(1000), client.rng.randrange(300_000))))
        if client.rng.random() < 0.5:
            wire.reset()
    return [Result(Outcome.ABANDONED)]


async def abandon_while_sending(client: Client) -> list[Result]:
    message = text_request(client, client.words(50, 200), stream=True)
    async with client.wire() as wire:
        await wire.send(message[: client.rng.randrange(1, len(message))])
        await asyncio.sleep(client.rng.uniform(0.0, 0.2))
        if client.rng.random() < 0.5:
            wire.reset()
    return [Result(Outcome.ABANDONED)]


async def abandon_plain(client: Client) -> list[Result]:
    """Disconnects before an answer without a stream."""
    async with client.wire() as wire:
        await wire.send(post("/completion", {"prompt": "Once", "n_predict": 3000, "ignore_eos": True}))
        await asyncio.sleep(client.rng.uniform(0.0, 0.5))
    return [Result(Outcome.ABANDONED)]


# --- status requests and invalid requests ----------------------------------------------------------------


async def read_status(client: Client) -> list[Result]:
    path = client.rng.choice(
        ("/livez", "/readyz", "/health", "/v1/models", "/props", "/slots", "/metrics", "/llamasup/v1/status")
    )
    closed = path.startswith("/llamasup/")  # there is no admin key
    async with client.wire() as wire:
        await wire.send(request("GET", path))
        answer = await wire.answer()
    if answer.whole and closed and answer.status in (401, 403):
        return [Result(Outcome.REFUSED)]
    if answer.status in (502, 503) and answer.error and path not in ("/livez", "/metrics"):
        return [Result(Outcome.CUT, str(answer))]
    return seen(answer, len(answer.body) > 0)


_LONG = {"prompt": "there " * 6000}
_INVALID_REQUESTS: tuple[tuple[bytes, int], ...] = (
    (b"NO REQUEST\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n"
        b"\r\n0\r\n\r\n",
        400,
    ),
    (request("POST", "/completion", b"", headers="Content-Length: 7\r\n"), 400),
    (request("GET", "/v1/models", key="another"), 401),
    (post("/completion", {"prompt": "a"}, key="another"), 401),
    (request("GET", "/v1/models", host="elsewhere.example", key="another"), 403),
    (request("GET", "/v1/models", headers="Origin: https://elsewhere.example\r\n"), 403),
    (post("/props", {}), 403),
    (post("/slots/0?action=save", {}), 403),
    (b"POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
     b"Content-Length: 209715200\r\n\r\n" % KEY.encode(), 413),
    (request("GET", "/v1/models", headers=f"X-Large: {'x' * 70_000}\r\n"), 431),
    (request("POST", "/v1/chat/completions", b'{"messages": '), 400),
    (post("/v1/chat/completions", {"messages": "none"}), 400),
    (post("/completion", _LONG), 400),
    (post("/v1/embeddings", {"input": "a"}), 501),
)  # fmt: skip


async def invalid_request(client: Client) -> list[Result]:
    message, status = client.rng.choice(_INVALID_REQUESTS)
    async with client.wire() as wire:
        await wire.send(message)
        answer = await wire.answer()
    correct = answer.status == status and bool(answer.error)
    return [
        Result(
            Outcome.REFUSED if correct else Outcome.LOST, f"wanted {status} for {message[:60]!r}: {answer}"
        )
    ]


IDLE = Kind("idle connections", 0, idle)
KINDS = (
    Kind("plain answers", 30, plain),
    Kind("streams", 25, stream),
    Kind("long streams", 4, long_answer),
    Kind("slow readers", 3, slow_reader),
    Kind("slow senders", 4, slow_sender),
    Kind("several on one connection", 5, keep_alive),
    Kind("pipelined", 5, pipelined),
    Kind("tokenize and back", 6, tokenize),
    Kind("big bodies", 2, big_body),
    Kind("leave in mid-stream", 10, abandon_stream),
    Kind("leave while sending", 4, abandon_while_sending),
    Kind("leave before the answer", 4, abandon_plain),
    Kind("look at status and metrics", 6, read_status, work=False),
    Kind("bad requests", 8, invalid_request),
)  # fmt: skip
