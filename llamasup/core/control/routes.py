"""The HTTP routes of the control API (docs/control.md).

Access is checked before: by the permissions of the private socket, or by the proxy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from llamasup.core.control.interface import (
    ConfigAccess,
    ConfigMistakes,
    ControlTarget,
    MakeConsole,
    MakeRoutes,
)
from llamasup.core.control.json_body import PREFIX, is_from_proxy, json_answer, read_body
from llamasup.core.control.streams import (
    MAX_PULLS,
    MAX_PULLS_OF_ONE,
    RequestUpdates,
    Stream,
    Streams,
    event_stream,
    log_stream,
    open_log,
    pull_stream,
)
from llamasup.core.http.errors import error_object, type_of
from llamasup.core.observability.counters import Metrics
from llamasup.core.observability.last_hour import STEP_S, LastHour
from llamasup.core.observability.own_log import OwnLog, OwnLogTail
from llamasup.core.observability.prometheus import CONTENT_TYPE, exposition
from llamasup.core.pool.why.recording import MAX_DECISIONS
from llamasup.core.proxy.live.requests import MAX_ENDED, LiveRequests
from llamasup.core.system.hardware.nvml import vram_by_process
from llamasup.core.system.process.log_tail import MAX_LINES, LogTail
from llamasup.errors import Conflict, LlamasupError, UsageInvalid

USUAL_LINES = 200
_CHANGES = ("load", "unload", "restart")

_log = logging.getLogger(__name__)


class _ConfigText(msgspec.Struct):
    text: str
    version: str = ""


class _PullRequest(msgspec.Struct):
    """``client``: the name of the key that asked for the download with Ollama's API."""

    model: str
    client: str = ""


class _PlanRequest(msgspec.Struct):
    model: str
    settings: dict[str, Any] = {}


_Work = Callable[[], Coroutine[Any, Any, Any]]


class Application:
    """The ASGI application. ``tasks`` owns the changes that continue after their response (``wait=0``)."""

    def __init__(
        self,
        control_target: ControlTarget,
        metrics: Metrics,
        requests: LiveRequests,
        last_hour: LastHour,
        tasks: asyncio.TaskGroup,
        make_console: MakeConsole | None = None,
        *,
        own_log: OwnLog,
        more_routes: MakeRoutes = tuple,
    ) -> None:
        self._control_target = control_target
        self._metrics = metrics
        self._requests = requests
        self._updates = RequestUpdates(requests)
        self._last_hour = last_hour
        self._tasks = tasks
        self._own_log = own_log
        self._streams = Streams()
        self._pulls = Streams(MAX_PULLS, "downloads", MAX_PULLS_OF_ONE)
        self._console = None if make_console is None else make_console(self._streams.wake)
        self._background: set[asyncio.Task[LlamasupError | None]] = set()
        model = PREFIX + "/models/{model:path}"  # may contain slashes, encoded as %2F or not
        routes: list[BaseRoute] = [
            _get("/metrics", self._show_metrics),
            _get(f"{PREFIX}/status", self._show_status),
            _get(f"{PREFIX}/events", self._show_events),
            _get(f"{PREFIX}/requests", self._show_requests),
            # An id comes from the client, and may contain a slash.
            Route(f"{PREFIX}/requests/{{id:path}}", self._cancel_request, methods=["DELETE"]),
            _get(f"{PREFIX}/memory", self._show_memory),
            _get(f"{PREFIX}/history", self._show_history),
            _post(f"{PREFIX}/plan", self._plan),
            _get(f"{PREFIX}/config", self._show_config),
            _post(f"{PREFIX}/config/check", self._check_config),
            Route(f"{PREFIX}/config", self._replace_config, methods=["PUT"]),
            _get(f"{PREFIX}/decisions", self._show_decisions),
            _get(f"{PREFIX}/logs", self._show_own_log),
            _get(f"{model}/logs", self._show_log),
            _get(f"{model}/why", self._show_why),
            *(_post(f"{model}/{what}", partial(self._change, what)) for what in _CHANGES),
            _post(f"{model}/remove", self._remove),
            _post(f"{PREFIX}/pull", self._pull_model),
            _post(f"{PREFIX}/reload", self._reload),
            _post(f"{PREFIX}/shutdown", self._shutdown),
            *(() if self._console is None else self._console.routes),
            *more_routes(),
        ]
        handlers = {LlamasupError: _own_error, HTTPException: _http_error, Exception: _bug}
        self._starlette = Starlette(routes=routes, exception_handlers=handlers)
        self._starlette.router.redirect_slashes = False  # a name may end with a slash
        # For the routes of features.
        self._kinds = [self._streams, self._pulls]
        state = self._starlette.state
        state.streams, state.is_open, state.in_background = self._kinds, self._is_open, self._in_background

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. A route of Starlette also matches a path with a newline after it."""
        if scope["path"].endswith("\n"):
            scope = {**scope, "path": "/"}  # which is no route
        await self._starlette(scope, receive, send)

    def end(self) -> None:
        """End the streams, and cancel the changes in the background."""
        for streams in self._kinds:
            streams.end()
        for task in self._background:
            task.cancel()

    # --- reading

    async def _show_metrics(self, request: Request) -> Response:
        scraped = await self._control_target.scrape()
        target = self._control_target
        text = exposition(self._metrics, target.gauges(), scraped, target.node_gauges())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _show_status(self, request: Request) -> Response:
        status = self._control_target.status()
        if any(model["pid"] is not None for model in status["models"]):
            # In a thread: the driver is slow.
            vram = await asyncio.to_thread(vram_by_process)
            status = {**status, "models": [_with_vram(model, vram) for model in status["models"]]}
        return json_answer(status)

    async def _show_events(self, request: Request) -> Response:
        requests = self._updates if _number(request, "requests", 0, 1) else None
        self._streams.enter()
        events = event_stream(self._control_target, self._streams, requests, is_open=self._is_open(request))
        return Stream(self._streams, events, "text/event-stream")

    async def _show_requests(self, request: Request) -> Response:
        ended = _number(request, "ended", 0, MAX_ENDED)
        return json_answer(await self._requests.shown(ended))

    async def _show_memory(self, request: Request) -> Response:
        return json_answer(await self._control_target.memory())

    async def _show_history(self, request: Request) -> Response:
        now_s = time.monotonic()
        self._last_hour.note_memory(now_s, self._control_target.held_bytes())
        series = dict(self._last_hour.series(now_s, self._requests.waiting_since()))
        now = datetime.now(UTC)
        began = [now - timedelta(seconds=age_s or 0.0) for age_s in series.pop("age_s")]
        times = [at.isoformat(timespec="seconds") for at in began]
        return json_answer({"step_s": STEP_S, "series": {"time": times, **series}})

    async def _plan(self, request: Request) -> Response:
        asked = await read_body(request, _PlanRequest)
        if is_from_proxy(request):
            from llamasup.core.control.what_if import refuse_hosts  # here, to keep the start short

            refuse_hosts(asked.settings)
        return json_answer(await self._control_target.plan(asked.model, asked.settings))

    async def _show_config(self, request: Request) -> Response:
        config = self._control_target.config
        if config is None:
            return json_answer({"file": None, "text": "", "version": "", "writable": False})
        return json_answer(await config.show())

    async def _check_config(self, request: Request) -> Response:
        asked = await read_body(request, _ConfigText)
        return json_answer(await self._config().check(asked.text, trusted=not is_from_proxy(request)))

    async def _replace_config(self, request: Request) -> Response:
        asked = await read_body(request, _ConfigText)
        try:
            trusted = not is_from_proxy(request)
            return json_answer(await self._config().replace(asked.text, asked.version, trusted=trusted))
        except ConfigMistakes as error:
            return json_answer({**error_object(error), "mistakes": error.mistakes}, error.http_status)

    def _config(self) -> ConfigAccess:
        config = self._control_target.config
        if config is None:
            raise Conflict(
                "No config file alone makes the configuration of this llamasup.",
                remedy="Start `llamasup serve --config FILE`.",
            )
        return config

    async def _show_why(self, request: Request) -> Response:
        return json_answer(self._control_target.why(request.path_params["model"]))

    async def _show_decisions(self, request: Request) -> Response:
        limit = _number(request, "limit", MAX_DECISIONS, MAX_DECISIONS)
        return json_answer({"decisions": self._control_target.decisions(limit)})

    async def _show_own_log(self, request: Request) -> Response:
        lines = _number(request, "lines", USUAL_LINES, MAX_LINES)
        return self._log_of(self._own_log.tail(lines), request)

    async def _show_log(self, request: Request) -> Response:
        model = request.path_params["model"]
        lines = _number(request, "lines", USUAL_LINES, MAX_LINES)
        return self._log_of(await open_log(self._control_target.log_path(model), model, lines), request)

    def _log_of(self, log: LogTail | OwnLogTail, request: Request) -> Response:
        try:
            follow = _number(request, "follow", 0, 1) == 1
            self._streams.enter()
        except LlamasupError:
            log.close()
            raise
        pieces = log_stream(log, self._streams, follow=follow, is_open=self._is_open(request))
        return Stream(self._streams, pieces, "text/plain; charset=utf-8", log.close)

    def _is_open(self, request: Request) -> Callable[[], bool]:
        return (lambda: True) if self._console is None else self._console.is_open_for(request)

    # --- changing

    async def _change(self, what: str, request: Request) -> Response:
        model = request.path_params["model"]
        work = partial(getattr(self._control_target, what), model)
        done = await self._execute(request, work, while_awaited=True)
        return json_answer(self._status_of(model), 200 if done else 202)

    async def _remove(self, request: Request) -> Response:
        return json_answer(await self._control_target.remove(request.path_params["model"]))

    async def _pull_model(self, request: Request) -> Response:
        asked = await read_body(request, _PullRequest)
        fetch = self._control_target.pull(asked.model)
        pulls = self._pulls
        pulls.enter(asked.client)
        frames = pull_stream(fetch, pulls, self._tasks)
        return Stream(pulls, frames, "text/event-stream", client=asked.client)

    async def _cancel_request(self, request: Request) -> Response:
        return json_answer(self._requests.shown_cancel(request.path_params["id"]))

    async def _reload(self, request: Request) -> Response:
        changes: Mapping[str, Any] = {}

        async def reload() -> None:
            nonlocal changes
            changes = await self._control_target.reload()

        done = await self._execute(request, reload)
        return json_answer(changes, 200 if done else 202)

    async def _shutdown(self, request: Request) -> Response:
        status = self._control_target.status()
        self._control_target.shutdown(now=_number(request, "now", 0, 1) == 1)
        in_flight = sum(model["in_flight"] for model in status["models"])
        return json_answer({"pid": status["pid"], "in_flight": in_flight}, 202)

    async def _execute(self, request: Request, work: _Work, *, while_awaited: bool = False) -> bool:
        """Whether ``work`` is done: with ``wait=0`` it may continue in the background. Raises its early
        errors.

        ``while_awaited``: cancel it if a client that waits for it disconnects.
        """
        if _number(request, "wait", 1, 1) == 1:
            await (_while_awaited(request, work) if while_awaited else work())
            return True
        return await self._in_background(work, f"control{request.url.path}")

    async def _in_background(self, work: _Work, name: str) -> bool:
        """Whether ``work`` is done at once; else it continues. Raises its early errors."""
        task = self._tasks.create_task(_caught(work), name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await asyncio.sleep(0)
        if task.done():
            if (error := task.result()) is not None:
                raise error
            return True
        task.add_done_callback(_log_failure)
        return False

    def _status_of(self, name: str) -> Mapping[str, Any]:
        for model in self._control_target.status()["models"]:
            if name == model["id"] or name in model["aliases"]:
                return dict(model)
        return {"id": name}  # removed in the meantime


async def _while_awaited(request: Request, work: _Work) -> None:
    """Run ``work`` and raise its error. Cancel it if the client disconnects, so that no model is evicted for
    a load without a client.
    """
    failure: Exception | None = None

    async def carry_out() -> None:
        nonlocal failure
        try:
            await work()
        except Exception as error:
            failure = error
        finally:
            watching.cancel()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_until_gone(request), name=f"control{request.url.path}/client")
        working = tasks.create_task(carry_out(), name=f"control{request.url.path}")
        watching.add_done_callback(lambda _: working.cancel())
    if failure is not None:
        raise failure


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass  # the body is not used


async def _caught(work: _Work) -> LlamasupError | None:
    """The error of ``work``, which must not end llamasup."""
    try:
        await work()
    except LlamasupError as error:
        return error
    except Exception:
        _log.exception("a request of the control API failed")
    return None


def _log_failure(task: asyncio.Task[LlamasupError | None]) -> None:
    if not task.cancelled() and (error := task.result()) is not None:
        _log.warning("A request of the control API failed: %s", error.message)


# --- requests and answers ----------------------------------------------------------------------------

_Handler = Callable[[Request], Awaitable[Response]]


def _get(path: str, handler: _Handler) -> Route:
    return Route(path, handler, methods=["GET"])


def _post(path: str, handler: _Handler) -> Route:
    return Route(path, handler, methods=["POST"])


def _number(request: Request, name: str, default: int, most: int) -> int:
    """A number of the query. Raises UsageInvalid."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= most):
        raise UsageInvalid(f"{name}={text[:40]!r} is not a valid value.", remedy=f"Use 0 to {most}.")
    return int(text)


def _with_vram(model: Mapping[str, Any], vram: Mapping[int, int]) -> Mapping[str, Any]:
    pids = [replica["pid"] for replica in model.get("replicas", (model,))]
    known = [vram[pid] for pid in pids if pid in vram]
    if not known:
        return model
    return {**model, "memory": {**model["memory"], "vram_bytes": sum(known)}}


async def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LlamasupError)
    return json_answer(error_object(error), error.http_status)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers the router's errors: unknown path, or wrong method."""
    assert isinstance(error, HTTPException)
    problem = "this path needs another method" if error.status_code == 405 else "no such path"
    message = f"{request.method} {request.url.path[:200]}: {problem}"
    shown = {
        "message": message,
        "type": type_of(error.status_code),
        "code": error.status_code,
        "cause": "no_such_route",
        "remedy": "docs/control.md lists all paths",
    }
    return json_answer({"error": shown}, error.status_code, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, which logs the traceback."""
    ours = LlamasupError(f"Internal error in llamasup: {type(error).__name__}.", remedy="See its log.")
    return json_answer(error_object(ours), ours.http_status)
