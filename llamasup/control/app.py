"""The control application: metrics and status as HTTP, on a private Unix socket.

Starlette on uvicorn. They cost 0.2 s to import, so nothing here is loaded before the first connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.core.address import UnixAddress
from llamasup.core.json_text import json_text
from llamasup.runtime.endpoint import Endpoint

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request

    from llamasup.runtime.metrics import Metrics
    from llamasup.runtime.supervisor import Supervisor

__all__ = ["ControlServer"]

BACKLOG = 64
CLOSE_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


class ControlServer:
    """Listens at once, loads the application when somebody comes."""

    def __init__(self, socket_path: Path, supervisor: Supervisor, metrics: Metrics) -> None:
        self.endpoint = Endpoint("", 0, UnixAddress(str(socket_path)))
        self._supervisor = supervisor
        self._metrics = metrics
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(socket_path))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()

        def first_connection() -> None:
            loop.remove_reader(self._listener)
            self._task = tasks.create_task(self._serve(), name="control")

        loop.add_reader(self._listener, first_connection)

    async def aclose(self) -> None:
        self.endpoint.close("llamasup is stopping")
        if self._task is None:
            asyncio.get_running_loop().remove_reader(self._listener)
        else:
            if self._server is None:  # still being imported
                self._task.cancel()
            else:
                self._server.should_exit = True
                self._server.force_exit = True
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            self._task.cancel()
        self._listener.close()

    async def _serve(self) -> None:
        try:
            # In a thread: importing these takes 0.2 s, and requests are being served meanwhile.
            self._server = await asyncio.to_thread(self._load)
            await self._server.serve(sockets=[self._listener])
        except Exception:
            # Nobody's model is to go because the metrics are broken: from now on the proxy answers 502.
            _log.exception("the control application failed")
            self._listener.close()

    def _load(self) -> uvicorn.Server:
        import uvicorn

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                """Signals are the supervisor's."""
                yield

        config = uvicorn.Config(
            application(self._supervisor, self._metrics),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        return Server(config)


def application(supervisor: Supervisor, metrics: Metrics) -> Starlette:
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from llamasup.control.metrics import CONTENT_TYPE, InstanceGauges, exposition

    async def show_metrics(request: Request) -> Response:
        scraped = await supervisor.scrape()
        instances = [
            InstanceGauges(runner.model, runner.instance.state, runner.in_flight, queued=len(runner.room))
            for runner in supervisor.runners
        ]
        text = exposition(metrics, instances, scraped)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def show_status(request: Request) -> Response:
        return Response(json_text(supervisor.status()), media_type="application/json")

    return Starlette(
        routes=[
            Route("/metrics", show_metrics, methods=["GET"]),
            Route("/llamasup/v1/status", show_status, methods=["GET"]),
        ]
    )
