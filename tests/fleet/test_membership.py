"""A front of ``serve``, and what it knows of a fleet from a played directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import llamasup
from llamasup.errors import ConfigInvalid, UsageInvalid
from llamasup.fleet import membership as membership_module
from llamasup.fleet.membership import FleetMembership, as_front
from llamasup.fleet.messages import SIGNATURE, FleetNode, ListedModel, Poll, Snapshot
from llamasup.fleet.secret import directory_key, signature
from llamasup.service.config_check import environment_issues
from llamasup.service.serve import ServeOptions
from tests.kit.async_tests import async_test
from tests.kit.configs import load, read
from tests.kit.patience import PATIENCE_S

SECRET = "s" * 40
NODE = FleetNode("tiny@a", "https://192.0.2.1:1", "tiny")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front repeats a poll that failed, and reports another number of requests, after 10 ms."""
    monkeypatch.setattr(membership_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(membership_module, "_REPEAT_S", 0.01)


class PlayedDirectory:
    """Answers a poll when the snapshot is another one than the front has seen."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(1, True, "PEM", (), (ListedModel("tiny"),))
        self.signed_with = SECRET
        self.status = 200
        self.polls: list[Poll] = []
        self.keys: set[str] = set()
        self.news = asyncio.Event()
        self.url = ""
        self.connections = 0

    def publish(self, *nodes: FleetNode, settled: bool = True) -> None:
        before = self.snapshot
        self.snapshot = Snapshot(before.version + 1, settled, "PEM", nodes, before.models)
        self.news.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            poll = msgspec.json.decode(await reader.readexactly(int(fields["content-length"])), type=Poll)
            self.keys.add(fields["authorization"])
            self.polls.append(poll)
            while self.status == 200 and poll.seen == self.snapshot.version:
                self.news.clear()
                await self.news.wait()
            body = msgspec.json.encode(self.snapshot)
            signed = signature(self.signed_with, poll.nonce, body)
            writer.write(
                f"HTTP/1.1 {self.status} X\r\n{SIGNATURE}: {signed}\r\nConnection: close\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self.connections -= 1


@asynccontextmanager
async def front_of(directory: PlayedDirectory) -> AsyncIterator[FleetMembership]:
    server = await asyncio.start_server(directory.serve, "127.0.0.1", 0)
    directory.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    membership = FleetMembership(directory.url, SECRET)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(membership.run())
        yield membership
        running.cancel()
    directory.status = 500  # polls end
    directory.news.set()
    server.close()
    await until(lambda: not directory.connections)
    await server.wait_closed()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.01)


@async_test
async def test_front_learns_of_models_and_then_of_nodes() -> None:
    directory = PlayedDirectory()
    async with front_of(directory) as membership:
        async with asyncio.timeout(PATIENCE_S):
            await membership.changed()
        assert [model.id for model in membership.expected()] == ["tiny"]
        assert membership.current() == ()
        directory.publish(NODE)
        async with asyncio.timeout(PATIENCE_S):
            await membership.changed()
        assert [peer.url for peer in membership.current()] == ["https://192.0.2.1:1"]
        assert directory.keys == {f"bearer {directory_key(SECRET)}"}
        assert "1 nodes" in repr(membership)


@async_test
async def test_waiting_requests_are_reported_and_so_are_another_number_and_their_end() -> None:
    directory = PlayedDirectory()
    async with front_of(directory) as membership:
        await until(lambda: directory.polls and directory.polls[-1].seen == 1)
        for number, waiting in ((1, {"tiny": 1}), (5, {"tiny": 5}), (0, {})):
            membership.wanted("tiny", number)
            await until(lambda waiting=waiting: directory.polls[-1].waiting == waiting)  # type: ignore[misc]
        numbers = [poll.number for poll in directory.polls]
        assert numbers == sorted(set(numbers)), "each poll has a higher number than those before"


@async_test
async def test_changes_that_come_together_are_one_report() -> None:
    directory = PlayedDirectory()
    async with front_of(directory) as membership:
        await until(lambda: directory.polls and directory.polls[-1].seen == 1)
        membership.wanted("tiny", 1)
        await until(lambda: directory.polls[-1].waiting == {"tiny": 1})
        asked = len(directory.polls)
        for number in (2, 3, 1, 4, 0):
            membership.wanted("tiny", number)
        await until(lambda: directory.polls[-1].waiting == {})
        assert len(directory.polls) == asked + 1


@async_test
async def test_answer_without_the_right_signature_changes_nothing() -> None:
    directory = PlayedDirectory()
    async with front_of(directory) as membership:
        await until(membership.expected)
        directory.signed_with = "t" * 40
        directory.publish(NODE)
        await until(lambda: "not signed" in membership.problem)
        assert membership.current() == ()


@async_test
async def test_nodes_stay_while_the_directory_fails_and_it_is_asked_again() -> None:
    directory = PlayedDirectory()
    async with front_of(directory) as membership:
        directory.publish(NODE)
        await until(membership.current)
        for status, problem in ((500, "HTTP status 500"), (401, "refuses the secret")):
            directory.status = status
            directory.news.set()
            await until(lambda problem=problem: problem in membership.problem)  # type: ignore[misc]
            assert len(membership.current()) == 1
        directory.status = 200
        directory.publish()
        await until(lambda: not membership.current() and not membership.problem)


# --- a front of serve --------------------------------------------------------------------------------

CONFIG = """
models:
  tiny: {path: tiny.gguf, aliases: [gpt-tiny]}
  "t*": {threads: 1}
fleet: {directory: "http://127.0.0.1:1", key_file: fleet.key}
"""


def config_in(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(CONFIG)
    return path


def write_secret(folder: Path) -> None:
    (folder / "fleet.key").write_text("s" * 40)
    (folder / "fleet.key").chmod(0o600)


@async_test
async def test_front_serves_no_model_itself_and_knows_those_of_the_config_at_once(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    write_secret(tmp_path)
    options = as_front(
        ServeOptions.of(lambda: load(path, os.environ), config_file=path, adjust=lambda config: config), {}
    )
    assert options.initial_config is not None
    assert options.adjust is not None
    for config in (options.initial_config, options.config(), options.adjust(load(path, os.environ))):
        assert config.models == {}
    assert options.membership is not None
    (model,) = options.membership().expected()
    assert (model.id, model.aliases) == ("tiny", ("gpt-tiny",))


def test_front_without_the_secret_does_not_start(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    options = ServeOptions.of(lambda: load(path, os.environ), config_file=path)
    with pytest.raises(ConfigInvalid, match="no secret of the fleet"):
        as_front(options, {})


def test_front_with_models_of_its_own_is_refused(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    options = ServeOptions.of(lambda: load(path, os.environ), config_file=path)
    with pytest.raises(UsageInvalid, match="only the models of the fleet"):
        as_front(options, {}, has_own_models=True)


def test_service_of_a_program_is_a_front_too(tmp_path: Path) -> None:
    path = config_in(tmp_path)
    write_secret(tmp_path)
    serving = llamasup.serve(config=path)
    options = serving._serve_options(serving._given)
    assert options.membership is not None
    assert options.config().models == {}
    with pytest.raises(UsageInvalid, match="only the models of the fleet"):
        serving = llamasup.serve(config=path, models_dir=tmp_path)
        serving._serve_options(serving._given)


def test_check_of_a_front_needs_no_model_file(tmp_path: Path) -> None:
    reading, issues = read(config_in(tmp_path), {})
    assert not issues
    found = environment_issues(reading, {})
    assert not [issue for issue in found if issue.key.startswith("models")]
