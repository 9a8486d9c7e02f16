"""Serves the control application on a private address, with Starlette on uvicorn.

They take 0.2 s to import, so the application is loaded at the first connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.core.control.private_socket import THROUGH_PROXY, listen, with_key
from llamasup.core.queueing.endpoint import Endpoint, generation_ended
from llamasup.core.system.event_loops import AcceptWatch

if TYPE_CHECKING:
    import uvicorn

    from llamasup.core.control.routes import Application

CLOSE_TIMEOUT_S = 1.0
SHUTDOWN_POLL_S = 0.005

_log = logging.getLogger(__name__)


class ControlServer:
    """Listens at once, and loads the application at the first connection: it calls ``make`` in a
    thread.
    """

    def __init__(self, socket_path: Path, make: Callable[[asyncio.TaskGroup], Application]) -> None:
        listening = listen(socket_path)
        self.endpoint = Endpoint("", 0, listening.address, listening.key, mark=THROUGH_PROXY + b": 1\r\n")
        self._make_application = make
        self._listener = listening.sock
        self._key = listening.key
        self._first: AcceptWatch | None = None
        self._server: uvicorn.Server | None = None
        self._application: Application | None = None
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        def first_connection() -> None:
            self._stop_waiting()
            self._task = tasks.create_task(self._serve(tasks), name="control")

        self._first = AcceptWatch(self._listener, first_connection)

    def _stop_waiting(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.close()

    async def aclose(self) -> None:
        """Accept no more connections, end the streams, and answer the pending requests."""
        if self._task is None:
            self._stop_waiting()
        else:
            server = self._server
            if server is None or self._application is None:  # still being imported
                self._task.cancel()
            else:
                self._application.end()
                self._end.set()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            if server is not None:  # clients that do not read
                for task in server.server_state.tasks:
                    task.cancel()
            self._task.cancel()
        self._listener.close()
        self.endpoint.close(generation_ended("llamasup is stopping"))

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        try:
            # In a thread: importing these takes 0.2 s, while the proxy serves requests.
            server, self._application = await asyncio.to_thread(self._load, tasks)
            self._server = server
            await server.serve(sockets=[self._listener])
        except Exception:
            # A broken control application must not end the models: the proxy now answers 502 for it.
            _log.exception("the control application failed")
            self._listener.close()

    def _load(self, tasks: asyncio.TaskGroup) -> tuple[uvicorn.Server, Application]:
        import uvicorn

        class Server(uvicorn.Server):
            """A server that does without uvicorn's clock, which wakes up ten times a second."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                """The supervisor handles signals."""
                yield

            async def main_loop(self) -> None:
                await end.wait()

            async def shutdown(self, sockets: object = None) -> None:
                for server in self.servers:
                    server.close()
                for connection in list(self.server_state.connections):
                    connection.shutdown()
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - no event to wait for
                    await asyncio.sleep(SHUTDOWN_POLL_S)

        end = self._end
        application = self._make_application(tasks)
        config = uvicorn.Config(
            application.asgi if self._key is None else with_key(application.asgi, self._key),
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
        )
        return Server(config), application
