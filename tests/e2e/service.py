"""A service in this process, over a real child: for what the command line has no options for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import httpx

from llamasup.core.proxy.listeners.bind import bind
from llamasup.core.supervision.events import Bus, PublishedEvent, ServerExited, StateChanged
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import State
from llamasup.service.hosting import Service
from llamasup.service.options import RunOptions, ServiceOptions
from tests.kit.patience import PATIENCE_S

__all__ = ["PATIENCE_S", "Serving", "hosted", "serving"]

N = TypeVar("N")


class Serving:
    """A running service, its events, and a client."""

    def __init__(self, service: Service, bus: Bus, client: httpx.AsyncClient) -> None:
        self.service = service
        self.bus = bus
        self.client = client
        self.notices: list[PublishedEvent] = []
        self._news = asyncio.Condition()

    def runner_of(self, model: str) -> InstanceRunner:
        """The process of one of several models, once it was loaded."""
        assert self.service.hosted_models is not None
        return self.service.hosted_models.runners_of(model)[0]

    @property
    def runner(self) -> InstanceRunner:
        assert self.service.runner is not None
        return self.service.runner

    @property
    def pid(self) -> int:
        assert self.runner.pid is not None
        return self.runner.pid

    async def wait_for_event(self, kind: type[N], holds: Callable[[N], bool] = lambda notice: True) -> N:
        """The first notice of this kind of which ``holds`` is true, past or to come."""
        seen = 0
        async with asyncio.timeout(PATIENCE_S), self._news:
            while True:
                for notice in self.notices[seen:]:
                    if isinstance(notice, kind) and holds(notice):
                        return notice
                seen = len(self.notices)
                await self._news.wait()

    async def reaches(self, state: State, generation: int) -> None:
        await self.wait_for_event(
            StateChanged, lambda event: (event.state, event.generation) == (state, generation)
        )

    async def exit_of(self, generation: int) -> ServerExited:
        return await self.wait_for_event(ServerExited, lambda event: event.generation == generation)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/completion", json={"prompt": "Once", "n_predict": 4, **fields})

    async def hear(self, notice: PublishedEvent) -> None:
        async with self._news:
            self.notices.append(notice)
            self._news.notify_all()


@asynccontextmanager
async def serving(model: object, *, runtime: str, **options: Any) -> AsyncIterator[Serving]:
    """``Service(RunOptions(...)).run()`` on a free port, stopped at the end. Requests may come at once."""
    async with hosted(partial(RunOptions, str(model), runtime=runtime, **options)) as server:
        yield server


@asynccontextmanager
async def hosted(options: Callable[..., ServiceOptions]) -> AsyncIterator[Serving]:
    """A service with these options, given its ``sockets``: as ``serving``."""
    bus = Bus()
    sockets = tuple(bind("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    service = Service(options(sockets=sockets), bus)
    notices: asyncio.Queue[PublishedEvent] = asyncio.Queue()
    bus.listen(notices.put_nowait)
    async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        run = tasks.create_task(service.run())
        telling = tasks.create_task(tell((server := Serving(service, bus, client)), notices))
        try:
            yield server
        finally:
            service.ask_stop()
            await asyncio.wait([run])
            telling.cancel()


async def tell(serving: Serving, notices: asyncio.Queue[PublishedEvent]) -> None:
    while True:
        await serving.hear(await notices.get())
