"""The control application's server: on a private Unix socket, loaded when somebody comes.

Starlette on uvicorn. They cost 0.2 s to import, so nothing of the application is loaded before the first
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.http.address import UnixAddress
from llamasup.queueing.endpoint import Endpoint

if TYPE_CHECKING:
    import uvicorn

    from llamasup.control.interface import ControlTarget
    from llamasup.control.routes import Application
    from llamasup.observability.metrics import Metrics

__all__ = ["ControlServer"]

BACKLOG = 64
CLOSE_TIMEOUT_S = 1.0
LAST_WORDS_S = 0.005

_log = logging.getLogger(__name__)


class ControlServer:
    """Listens at once, loads the application when somebody comes."""

    def __init__(self, socket_path: Path, controlled: ControlTarget, metrics: Metrics) -> None:
        self.endpoint = Endpoint("", 0, UnixAddress(str(socket_path)))
        self._controlled = controlled
        self._metrics = metrics
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(socket_path))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._server: uvicorn.Server | None = None
        self._application: Application | None = None
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()

        def first_connection() -> None:
            loop.remove_reader(self._listener)
            self._task = tasks.create_task(self._serve(tasks), name="control")

        loop.add_reader(self._listener, first_connection)

    async def aclose(self) -> None:
        """Answer those who wait, end the streams, take nobody any more."""
        if self._task is None:
            asyncio.get_running_loop().remove_reader(self._listener)
        else:
            server = self._server
            if server is None or self._application is None:  # still being imported
                self._task.cancel()
            else:
                self._application.end()
                self._end.set()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            if server is not None:  # somebody does not read
                for left in server.server_state.tasks:
                    left.cancel()
            self._task.cancel()
        self._listener.close()
        self.endpoint.close("llamasup is stopping")

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        try:
            # In a thread: importing these takes 0.2 s, and requests are being served meanwhile.
            server, self._application = await asyncio.to_thread(self._load, tasks)
            self._server = server
            await server.serve(sockets=[self._listener])
        except Exception:
            # Nobody's model is to go because the metrics are broken: from now on the proxy answers 502.
            _log.exception("the control application failed")
            self._listener.close()

    def _load(self, tasks: asyncio.TaskGroup) -> tuple[uvicorn.Server, Application]:
        import uvicorn

        from llamasup.control.routes import Application

        class Server(uvicorn.Server):
            """Without its clock, which wakes up ten times a second to set the date and look for the end."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                """Signals are the supervisor's."""
                yield

            async def main_loop(self) -> None:
                await end.wait()

            async def shutdown(self, sockets: object = None) -> None:
                for server in self.servers:
                    server.close()
                for connection in list(self.server_state.connections):
                    connection.shutdown()
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - they tell nobody
                    await asyncio.sleep(LAST_WORDS_S)

        end = self._end
        application = Application(self._controlled, self._metrics, tasks)
        config = uvicorn.Config(
            application.asgi,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
        )
        return Server(config), application
