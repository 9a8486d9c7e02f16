"""A running llamasup in a thread, for programs without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - registers its exit handler before _AtExit does
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack
from weakref import WeakSet

from llamasup.api.arguments import ModelArguments
from llamasup.api.async_server import AsyncServer, ended
from llamasup.api.events import Events, await_event, result_of
from llamasup.core.http.httpx_client import httpx
from llamasup.core.system.process.platform import loop_factory
from llamasup.errors import NotRunning, UsageInvalid

T = TypeVar("T")


class Server:
    """The result of ``with llamasup.serve(…)``: an ``AsyncServer`` with blocking methods.

    For all threads of the process that started it. Ctrl-C ends the wait, not the operation.
    """

    def __init__(self, thread: LoopThread, server: AsyncServer) -> None:
        """Use ``serve`` to create one."""
        self._thread = thread
        self._server = server
        self._client = server._access.client()

    def __repr__(self) -> str:
        return f"<llamasup.Server at {self.url}{' (ended)' if self._has_ended else ''}>"

    @property
    def url(self) -> str:
        """``http://127.0.0.1:43121``; of a Unix socket ``http://localhost``."""
        return self._server.url

    @property
    def client(self) -> httpx.Client:
        """A client for ``url`` with the API key and without a read timeout. For all threads."""
        self._thread.refuse_others()
        if self._has_ended:
            raise ended()
        return self._client

    def status(self) -> Mapping[str, Any]:
        """Return the ``status`` object of docs/design.md."""
        return self._thread.call(self._server.status)

    def why(self, model: str | None = None) -> Mapping[str, Any]:
        """Say why the model is in its state, as ``AsyncServer.why`` does."""
        return self._thread.call(partial(self._server.why, model))

    def usage(self, *, by: str = "model", since: str | None = None) -> Mapping[str, Any]:
        """Return the ``usage`` object, as ``AsyncServer.usage`` does."""
        return self._thread.do(self._server.usage(by=by, since=since))

    def requests(self, *, ended: int = 0) -> Mapping[str, Any]:
        """Return the requests in flight and the last finished ones, as ``AsyncServer.requests`` does."""
        return self._thread.do(self._server.requests(ended=ended))

    def cancel(self, request_id: str) -> Mapping[str, Any]:
        """Cancel the requests with this id, as ``AsyncServer.cancel`` does."""
        return self._thread.call(partial(self._server.cancel, request_id))

    def events(self) -> Events:
        """Return the events from now on, as ``AsyncServer.events`` does."""
        self._thread.refuse_others()
        return self._server._read(Events())

    def load(self, model: str | None = None) -> None:
        """Load the model, as ``AsyncServer.load`` does."""
        self._thread.do(self._server.load(model))

    def unload(self, model: str | None = None) -> None:
        """Unload the model, as ``AsyncServer.unload`` does."""
        self._thread.do(self._server.unload(model))

    def restart(self, model: str | None = None) -> None:
        """Restart the model, as ``AsyncServer.restart`` does."""
        self._thread.do(self._server.restart(model))

    def reload(self) -> Mapping[str, Any]:
        """Read the config and the folders again, as ``AsyncServer.reload`` does."""
        return self._thread.do(self._server.reload())

    def switch(
        self, model: str | Path, *, name: str | None = None, **options: Unpack[ModelArguments]
    ) -> None:
        """Serve another model under an existing name, as ``AsyncServer.switch`` does."""
        self._thread.do(self._server.switch(model, name=name, **options))

    def stop(self, *, now: bool = False) -> None:
        """Stop the server, as ``AsyncServer.stop`` does. Ctrl-C during the wait stops it at once."""
        self._end(now=now, quiet=False)

    @property
    def _has_ended(self) -> bool:
        return self._thread.has_ended

    def _end(self, *, now: bool, quiet: bool) -> None:
        try:
            self._thread.end(now=now, quiet=quiet)
        finally:
            self._client.close()


class LoopThread:
    """The thread of a ``Server``. llama-server dies with it (PR_SET_PDEATHSIG), and so with the process."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, AsyncServer]]) -> None:
        self._begin = begin
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="llamasup", daemon=True)
        self._begun: Future[Server] = Future()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # while it accepts work
        self._stop_asked = False
        self._serving: asyncio.Task[None] | None = None
        self._server: AsyncServer | None = None

    @property
    def has_ended(self) -> bool:
        return self._over.is_set()

    def start(self) -> Server:
        """Start the thread, and wait until it serves. Raises the error of a failed start."""
        self._thread.start()
        try:
            _AT_EXIT.add(self)
            return result_of(self._begun)
        except BaseException:
            self._ask_stop(now=True)
            await_event(self._over)
            raise

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop, and wait for it. An interrupt cancels it."""
        try:
            self.refuse_others()
            future = self._give(work)
        except BaseException:
            work.close()
            raise
        try:
            return result_of(future)
        except CancelledError:
            raise ended() from None
        finally:
            future.cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the loop, and wait for its result."""

        async def called() -> T:
            return function()

        return self.do(called())

    def end(self, *, now: bool, quiet: bool) -> None:
        """Stop the server, or its start. Raises the error of the server, once; not if ``quiet``."""
        if os.getpid() != self._pid:
            return  # it belongs to the parent process
        try:
            self._ask_stop(now=now)
            await_event(self._over)
        except BaseException:
            self._ask_stop(now=True)
            await_event(self._over)
            raise
        self._thread.join()
        error, self._error = self._error, None
        if error is not None and not quiet:
            raise error

    def refuse_others(self) -> None:
        """Raises UsageInvalid in a forked process, which has the object and not the thread."""
        if os.getpid() != self._pid:
            raise UsageInvalid(
                f"This server belongs to process {self._pid} and cannot be used after fork.",
                remedy="Pass its URL to the child process instead.",
            )
        if threading.current_thread() is self._thread:
            raise UsageInvalid(
                "A call in the server's own thread would wait for itself.", remedy="Use another thread."
            )

    # --- helpers ----------------------------------------------------------------------------------------

    def _give(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop is None:
                raise ended()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call_soon(self, what: Callable[[], object]) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(what)

    def _ask_stop(self, *, now: bool) -> None:
        def ask() -> None:
            if self._server is not None:
                self._server._ask_stop(now=now)
            elif self._serving is not None:
                self._serving.cancel()

        self._stop_asked = True  # first, since the loop may not exist yet
        self._call_soon(ask)

    # --- in the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            if not self._begun.done():
                self._begun.set_exception(self._why_not_begun())
            self._over.set()

    def _why_not_begun(self) -> BaseException:
        error = self._error
        if error is None or (self._stop_asked and isinstance(error, asyncio.CancelledError)):
            return NotRunning("llamasup was stopped before it was ready.")
        return error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.current_task()
        try:
            if not self._stop_asked:
                self._server = await self._begin()
                self._begun.set_result(Server(self, self._server))
                await self._server._until_ended(quiet=False)
        finally:
            with self._lock:
                self._loop = None
            # Let pending calls become tasks, which the end of the loop cancels.
            await asyncio.sleep(0)


class _AtExit:
    """Stops running servers before the interpreter stops executors and daemon threads. Without this hook of
    Python, the servers end with the process.
    """

    def __init__(self) -> None:
        self._threads: WeakSet[LoopThread] = WeakSet()
        self._lock = threading.Lock()
        self._registered = False

    def add(self, thread: LoopThread) -> None:
        with self._lock:
            self._threads.add(thread)
            if not self._registered:
                register = getattr(threading, "_register_atexit", None)  # concurrent.futures also uses it
                if register is not None:
                    register(self._end_all)
                self._registered = True

    def _end_all(self) -> None:
        with self._lock:
            threads = tuple(self._threads)
        for thread in threads:
            thread.end(now=True, quiet=True)


_AT_EXIT = _AtExit()
