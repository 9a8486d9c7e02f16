"""What the clients of the soak do: one function each, done over and over, and judged each time.

Every text that is asked for is the client's own: a grammar lets the server say nothing else. So an answer
that is short, mixed up with a neighbour's or somebody else's altogether is seen.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from llamasup.gguf.demo import WORDS
from llamasup.proxy import Limits
from tests.real.soak_wire import Answer, Outcome, Wire, judged, spoken

__all__ = ["IDLE", "KINDS", "MAX_IDLE_S", "Asked", "Client", "Kind"]

KEY = "soak-key"
KEEPALIVE_S = 75.0  # X8; for a connection that has been quiet for about as long, either end is right
MAX_IDLE_S = 90.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of one request."""

    outcome: Outcome
    said: str = ""
    """What the client saw, for whoever has to find out why."""


@dataclass(frozen=True, slots=True)
class Client:
    port: int
    dice: random.Random = field(default_factory=random.Random)
    most_idle_s: float = MAX_IDLE_S

    def wire(self, *, small: bool = False) -> Wire:
        return Wire(self.port, small=small)

    def words(self, least: int, most: int) -> str:
        return " ".join(self.dice.choices(WORDS, k=self.dice.randint(least, most)))


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    weight: int
    """How often, beside the others."""
    ask: Callable[[Client], Awaitable[list[Asked]]]
    work: bool = True
    """It waits for its model. What only looks may be told that there is none just now."""


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
    match client.dice.randrange(3):
        case 0:
            return post("/completion", {"prompt": client.words(1, 40), **common})
        case 1:
            return post("/v1/completions", {"prompt": client.words(1, 40), **common})
        case _:
            messages = [{"role": "user", "content": client.words(1, 40)}]
            return post("/v1/chat/completions", {"messages": messages, **common})


def long_stream(n_predict: int) -> bytes:
    return post("/completion", {"prompt": "Once", "n_predict": n_predict, "ignore_eos": True, "stream": True})


def seen(answer: Answer, right: bool) -> list[Asked]:
    return [Asked(judged(answer, right), str(answer))]


def said_all(answer: Answer, n_predict: int) -> bool:
    return bool(spoken(answer)) and f'"tokens_predicted":{n_predict},'.encode() in answer.body


# --- whoever asks for something and takes the answer -----------------------------------------------------


async def plain(client: Client) -> list[Asked]:
    text = client.words(1, 30)
    async with client.wire() as wire:
        await wire.send(text_request(client, text, stream=False))
        answer = await wire.answer()
    return seen(answer, spoken(answer) == text)


async def stream(client: Client) -> list[Asked]:
    text = client.words(3, 150)
    async with client.wire() as wire:
        await wire.send(text_request(client, text, stream=True))
        answer = await wire.answer()
    return seen(answer, spoken(answer) == text)


async def long_answer(client: Client) -> list[Asked]:
    n_predict = client.dice.randint(500, 3000)
    async with client.wire() as wire:
        await wire.send(long_stream(n_predict))
        answer = await wire.answer()
    return seen(answer, said_all(answer, n_predict))


async def slow_reader(client: Client) -> list[Asked]:
    n_predict = client.dice.randint(1500, 3000)
    async with client.wire(small=True) as wire:
        await wire.send(long_stream(n_predict))
        answer = await wire.answer(step=4096, pause_s=client.dice.uniform(0.0, 0.03))
    return seen(answer, said_all(answer, n_predict))


async def slow_sender(client: Client) -> list[Asked]:
    text = client.words(1, 30)
    message = text_request(client, text, stream=False)
    async with client.wire() as wire:
        for begin in range(0, len(message), 128):
            await wire.send(message[begin : begin + 128])
            await asyncio.sleep(client.dice.uniform(0.0, 0.4))
        answer = await wire.answer()
    return seen(answer, spoken(answer) == text)


async def keep_alive(client: Client) -> list[Asked]:
    asked: list[Asked] = []
    async with client.wire() as wire:
        for _ in range(client.dice.randint(2, 8)):
            text = client.words(1, 10)
            await wire.send(text_request(client, text, stream=client.dice.random() < 0.3))
            answer = await wire.answer()
            asked += seen(answer, spoken(answer) == text)
            if not answer.whole:
                break
            await asyncio.sleep(client.dice.uniform(0.0, 0.3))
    return asked


async def pipelined(client: Client) -> list[Asked]:
    """All sent at once. Behind an answer that is broken off nothing can follow, which its end tells too."""
    texts = [client.words(1, 10) for _ in range(client.dice.randint(2, 6))]
    asked: list[Asked] = []
    async with client.wire() as wire:
        await wire.send(b"".join(text_request(client, text, stream=False) for text in texts))
        for text in texts:
            answer = await wire.answer()
            asked += seen(answer, spoken(answer) == text)
            if not answer.whole:
                break
    return asked


async def tokenize(client: Client) -> list[Asked]:
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


async def big_body(client: Client) -> list[Asked]:
    """Up to 1.5 MB there, up to 7 MB back: a token for each letter.

    A body above 1 MiB is not kept, and cannot be sent again when its server dies.
    """
    letters = client.dice.randint(100_000, 1_500_000)
    async with client.wire() as wire:
        await wire.send(post("/tokenize", {"content": "x" * letters}))
        answer = await wire.answer()
    if letters > Limits().replay_bytes and answer.status == 502:
        return [Asked(Outcome.TOLD)]
    tokens = (answer.json or {}).get("tokens") or [] if answer.whole else []
    return seen(answer, len(tokens) == letters and len(set(tokens)) == 1)


async def idle(client: Client) -> list[Asked]:
    """Quiet after an answer, for longer than is allowed at times."""
    async with client.wire() as wire:
        await wire.send(request("GET", "/livez"))
        first = await wire.answer()
        quiet_s = client.dice.uniform(0.0, client.most_idle_s)
        await asyncio.sleep(quiet_s)
        text = client.words(1, 5)
        await wire.send(text_request(client, text, stream=False))
        second = await wire.answer()
    if quiet_s > KEEPALIVE_S - 2.0 and not second.status and not second.late:
        return [*seen(first, True), Asked(Outcome.REFUSED)]
    return seen(first, True) + seen(second, spoken(second) == text)


# --- whoever leaves --------------------------------------------------------------------------------------


async def leave_stream(client: Client) -> list[Asked]:
    """After any number of bytes, none of them included."""
    async with client.wire() as wire:
        await wire.send(long_stream(client.dice.randint(100, 3000)))
        await wire.read(client.dice.choice((0, client.dice.randrange(1000), client.dice.randrange(300_000))))
        if client.dice.random() < 0.5:
            wire.reset()
    return [Asked(Outcome.LEFT)]


async def leave_while_sending(client: Client) -> list[Asked]:
    message = text_request(client, client.words(50, 200), stream=True)
    async with client.wire() as wire:
        await wire.send(message[: client.dice.randrange(1, len(message))])
        await asyncio.sleep(client.dice.uniform(0.0, 0.2))
        if client.dice.random() < 0.5:
            wire.reset()
    return [Asked(Outcome.LEFT)]


async def leave_plain(client: Client) -> list[Asked]:
    """Whoever asked for the whole answer at once, and does not wait for it."""
    async with client.wire() as wire:
        await wire.send(post("/completion", {"prompt": "Once", "n_predict": 3000, "ignore_eos": True}))
        await asyncio.sleep(client.dice.uniform(0.0, 0.5))
    return [Asked(Outcome.LEFT)]


# --- whoever looks, and whoever asks for what cannot be --------------------------------------------------


async def look(client: Client) -> list[Asked]:
    path = client.dice.choice(
        ("/livez", "/readyz", "/health", "/v1/models", "/props", "/slots", "/metrics", "/llamasup/v1/status")
    )
    closed = path.startswith("/llamasup/")  # there is no admin key
    async with client.wire() as wire:
        await wire.send(request("GET", path))
        answer = await wire.answer()
    if answer.whole and closed and answer.status in (401, 403):
        return [Asked(Outcome.REFUSED)]
    if answer.status in (502, 503) and answer.error and path not in ("/livez", "/metrics"):
        return [Asked(Outcome.TOLD, str(answer))]
    return seen(answer, len(answer.body) > 0)


_LONG = {"prompt": "there " * 6000}
_BAD: tuple[tuple[bytes, int], ...] = (
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
    (request("GET", "/v1/models", host="elsewhere.example"), 403),
    (request("GET", "/v1/models", headers="Origin: https://elsewhere.example\r\n"), 403),
    (post("/props", {}), 403),
    (post("/slots/0?action=save", {}), 403),
    (b"POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
     b"Content-Length: 41943040\r\n\r\n" % KEY.encode(), 413),
    (request("GET", "/v1/models", headers=f"X-Large: {'x' * 70_000}\r\n"), 431),
    (request("POST", "/v1/chat/completions", b'{"messages": '), 400),
    (post("/v1/chat/completions", {"messages": "none"}), 400),
    (post("/completion", _LONG), 400),
    (post("/v1/embeddings", {"input": "a"}), 501),
)  # fmt: skip


async def bad(client: Client) -> list[Asked]:
    message, status = client.dice.choice(_BAD)
    async with client.wire() as wire:
        await wire.send(message)
        answer = await wire.answer()
    right = answer.status == status and bool(answer.error)
    return [
        Asked(Outcome.REFUSED if right else Outcome.LOST, f"wanted {status} for {message[:60]!r}: {answer}")
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
    Kind("leave in mid-stream", 10, leave_stream),
    Kind("leave while sending", 4, leave_while_sending),
    Kind("leave before the answer", 4, leave_plain),
    Kind("look at status and metrics", 6, look, work=False),
    Kind("bad requests", 8, bad),
)  # fmt: skip
