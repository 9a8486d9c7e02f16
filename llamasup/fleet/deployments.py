"""Runs in Ray Serve: the nodes, the directory, and with ``fleet.ingress`` the ingress. Imports Ray.

Serve starts, checks, scales, updates and ends the replicas; each is one llamasup (``node_process.py``).
``application.py`` declares the deployments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cached_property, partial
from hmac import compare_digest
from typing import Any, Final

import msgspec
import ray.util
from msgspec.structs import replace
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamasup.errors import ServerFailed
from llamasup.features.peers.nodes import ExpectedModel
from llamasup.fleet.certificates import authority
from llamasup.fleet.directory_table import DirectoryTable
from llamasup.fleet.ingress import Forward, Ingress, IngressSettings, ReplicaAnswer
from llamasup.fleet.ingress_settings import refuse_without_key
from llamasup.fleet.membership import FleetMembership
from llamasup.fleet.messages import (
    LEAVE_S,
    POLL_PATH,
    POLL_S,
    SIGNATURE,
    ListedModel,
    NodeLoad,
    NodeReport,
    Poll,
    Snapshot,
    routing_stats,
)
from llamasup.fleet.node_process import NO_ANSWER, NodeProcess, NodeSpec
from llamasup.fleet.node_requests import AnswerBegin, NodeRequests
from llamasup.fleet.replicas import LOAD, MAKES_ROOM
from llamasup.fleet.request_router import FORWARD
from llamasup.fleet.secret import directory_key, signature
from llamasup.fleet.serve_view import DIRECTORY, LAST_FAILED, Problem, problems, starting

REPORT_S: Final = 1.0
_ANNOUNCE_S = 5.0
_LOOK_S = 5.0
_DRAIN_POLL_S = 0.1
_MAX_POLL = 1 << 20  # bytes; a poll names the models that requests wait for
_GRPC_BYTES: Final = 3 << 20  # of a body; replicas of Serve (2.60) take messages of 4 MiB

_log = logging.getLogger("ray.serve")


class Node:
    """One replica."""

    async def __init__(self, spec: bytes) -> None:  # type: ignore[misc]  # Serve awaits it
        self._spec = msgspec.json.decode(spec, type=NodeSpec)
        context = serve.get_replica_context()
        self._name = f"{self._spec.model}@{context.replica_id.unique_id}"
        self._process = NodeProcess(self._spec, ray.util.get_node_ip_address())
        self._load = NodeLoad(slots=1)
        self._by_serve = 0
        self._makes_room = False
        self._directory = serve.get_deployment_handle(DIRECTORY, context.app_name)
        announcing = asyncio.get_running_loop().create_task(self._announce(), name="announce")
        try:
            await self._process.start()
        except ServerFailed as error:
            await self._tell("failed", 5.0, f"{error.message} {error.remedy}".strip())
            raise
        finally:
            announcing.cancel()
            await asyncio.wait({announcing})
        await self._tell("report", REPORT_S)  # at once: requests wait
        self._reporting = asyncio.get_running_loop().create_task(self._report(), name="report")

    async def wake(self) -> None:
        """Called while requests wait for the model: Serve starts the first replica for a waiting call."""

    @cached_property
    def _requests(self) -> NodeRequests:
        return NodeRequests(self._process.url, self._spec.secret)

    async def forward(self, target: bytes, lines: bytes, body: bytes) -> AsyncIterator[AnswerBegin | bytes]:
        """A request that entered at Serve (``NodeRequests.forward``)."""
        self._by_serve += 1
        try:
            async with contextlib.aclosing(self._requests.forward(target, lines, body)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._by_serve -= 1

    async def check_health(self) -> None:
        await self._process.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {LOAD: self._load.demand, MAKES_ROOM: float(self._makes_room)}

    async def _announce(self) -> None:
        """Tell the directory that this node starts. The first call takes half a second longer than others,
        in which Ray finds the directory: this is done before the model is loaded.
        """
        while True:
            was_taken = await self._tell("starts", _ANNOUNCE_S)
            await asyncio.sleep(_ANNOUNCE_S if was_taken else REPORT_S)

    async def record_routing_stats(self) -> dict[str, Any]:
        return routing_stats(self._load, ended=self._process.exit_code is not None)

    async def _report(self) -> None:
        backlog, wakes = 0.0, False
        while True:
            with contextlib.suppress(*NO_ANSWER):
                load = await self._process.load()
                self._load = replace(load, waiting=backlog, by_serve=self._by_serve)
                if wakes and self._load.asleep:
                    await self._process.wake()
            try:
                async with asyncio.timeout(REPORT_S * 3):
                    backlog = await self._directory.report.remote(self._encoded())
                    asks = self._load.asleep
                    wakes = asks and backlog > 0 and await self._directory.should_wake.remote(self._name)
                    self._makes_room = asks and await self._directory.makes_room.remote(self._name)
            except Exception as error:  # Ray's handles raise many errors; the next report is soon
                _log.warning("The directory did not take the report of %s: %r", self._name, error)
            await asyncio.sleep(REPORT_S)

    async def __del__(self) -> None:
        """Serve calls this once when the replica has to exit, after the requests that came through Serve.

        Fronts learn first that the node takes no new ones, and the running ones finish while the node still
        answers their probes.
        """
        reporting, cuts = getattr(self, "_reporting", None), True
        if reporting is not None:
            await self._tell("leave", LEAVE_S + 2.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._spec.drain_timeout_s):
                    await self._idle()
                    cuts = False
            reporting.cancel()
            await self._requests.aclose()
        await self._process.stop(now=cuts)
        if reporting is not None:
            await self._tell("end", 2.0)

    async def _idle(self) -> None:
        """Wait until no request is left, or llamasup has ended."""
        while self._process.exit_code is None:
            with contextlib.suppress(*NO_ANSWER):  # a busy machine answers late
                load = await self._process.load()
                if not load.busy and not load.queued:
                    return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _tell(self, what: str, timeout_s: float, *more: str) -> bool:
        """Call a method of the directory; return whether it took the call."""
        with contextlib.suppress(Exception):  # the directory may end at the same time
            async with asyncio.timeout(timeout_s):
                await getattr(self._directory, what).remote(self._encoded(), *more)
            return True
        return False

    def _encoded(self) -> bytes:
        return msgspec.json.encode(NodeReport(self._name, self._process.url, self._spec.model, self._load))


class Directory:
    """Knows the nodes, and tells the fronts in answers to their long polls."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: bytes, secret: str, handles: Mapping[str, DeploymentHandle], min_replicas: bytes
    ) -> None:
        self._secret = secret
        self._handles = handles
        self._table = DirectoryTable(
            msgspec.json.decode(models, type=list[ListedModel]),
            authority(secret),
            now_s=time.monotonic(),
            first_version=time.time_ns() // 1_000_000,
            min_replicas=msgspec.json.decode(min_replicas, type=dict[str, int]),
        )
        self._news = asyncio.Event()
        self._wakes: dict[str, asyncio.Task[None]] = {}
        self._failed: set[str] = set()
        self._look_s = 0.0  # when to look at Serve's status if it is only for sleeping nodes
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="watch")

    def reconfigure(self, _: Mapping[str, str]) -> None:
        """Serve calls it with ``user_config``, which ``llamasup fleet`` reads from Serve's own state."""

    # --- nodes ------------------------------------------------------------------------------------------

    async def starts(self, report: bytes) -> None:
        """The node has been placed, and loads its model."""
        self._table.starts(msgspec.json.decode(report, type=NodeReport), time.monotonic())

    async def report(self, report: bytes) -> float:
        """Returns the node's share of the requests that wait at the fronts."""
        node = msgspec.json.decode(report, type=NodeReport)
        if self._table.report(node, time.monotonic()):
            self._publish()
        return self._table.backlog(node.name)

    async def failed(self, report: bytes, problem: str) -> None:
        """The node could not start."""
        node = msgspec.json.decode(report, type=NodeReport)
        changes = self._table.end(node.name, time.monotonic())
        if self._table.note_problem(node.model, LAST_FAILED + problem) or changes:
            self._publish()

    async def should_wake(self, node: str) -> bool:
        """Tell whether this sleeping node should load its model for requests that wait at the fronts."""
        return self._table.should_wake(node, time.monotonic())

    async def makes_room(self, node: str) -> bool:
        """Tell whether this sleeping node should leave, to make room."""
        return self._table.makes_room(node, time.monotonic())

    async def leave(self, report: bytes) -> None:
        """Returns when the fronts know that the node takes no new requests, or after a while."""
        self._table.leave(msgspec.json.decode(report, type=NodeReport), time.monotonic())
        self._publish()
        version = self._table.version
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while not self._table.all_have_seen(version):  # noqa: ASYNC110 - polls tell it, one by one
                    await asyncio.sleep(0.02)

    async def end(self, report: bytes) -> None:
        node = msgspec.json.decode(report, type=NodeReport)
        if self._table.end(node.name, time.monotonic()):
            self._publish()

    async def nodes(self) -> bytes:
        """The latest reports, for ``llamasup fleet status``."""
        return msgspec.json.encode(self._table.nodes())

    # --- fronts -----------------------------------------------------------------------------------------

    async def __call__(self, request: Request) -> Response:
        if _is_poll(request):
            return await _answer_poll(request, self._secret, self.poll)
        message = "This is the directory of a llamasup fleet. Send requests to a front of the fleet."
        return JSONResponse(_error(message, "not_found_error"), 404)

    async def poll(self, encoded: bytes) -> bytes:
        """Return a ``Snapshot`` as soon as it differs from what the front has seen, or after a while."""
        poll = msgspec.json.decode(encoded, type=Poll)
        if self._table.poll(poll, time.monotonic()):
            self._publish()
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                while poll.seen == self._table.version:
                    await self._news.wait()
        return msgspec.json.encode(self._table.snapshot(time.monotonic()))

    def _wake(self) -> None:
        """Let one call wait at Serve for each model without a node that requests wait for, so that Serve
        starts its first replica. It keeps waiting if the requests give up, so that a start completes.

        A deployment that has failed gets no call: Serve (2.60) would start nothing for it, and not forget the
        failure, as it does when nothing has asked for the model for ``ABSENT_S``.
        """
        for model in self._table.wanted().keys() - self._wakes.keys() - self._failed:
            task = asyncio.get_running_loop().create_task(self._wait_for(model), name=f"wake {model}")
            self._wakes[model] = task
            task.add_done_callback(partial(lambda woken, _: self._wakes.pop(woken, None), model))

    async def _wait_for(self, model: str) -> None:
        try:
            await self._handles[model].wake.remote()
        except Exception as error:  # the next look at Serve's state tries again
            _log.warning("The model %s does not start: %r", model, error)

    async def _note_problems(self) -> None:
        """Note what Serve says of the models that requests wait for: not each failed start runs code of a
        node. Note the replicas without a place, for which sleeping ones can make room.
        """
        wanted = self._wakes.keys() | self._table.wanted().keys()
        only_sleeping = self._table.has_sleeping and not wanted and not self._table.lacks_room
        if only_sleeping and time.monotonic() < self._look_s:
            return
        found: Mapping[str, Problem] = {}
        replicas: Mapping[str, int] = {}
        if wanted or self._table.has_sleeping:
            with contextlib.suppress(Exception):  # the controller may start again
                applications = (await asyncio.to_thread(serve.status)).applications
                application = applications[serve.get_replica_context().app_name]
                found, replicas = problems(application), starting(application)
                self._failed = {model for model, problem in found.items() if problem.failed}
                self._look_s = time.monotonic() + _LOOK_S
        self._table.note_starting(replicas, time.monotonic())
        for model in wanted & found.keys():
            if model in self._failed and model in self._wakes:
                self._wakes[model].cancel()
            if self._table.note_problem(model, found[model].reason):
                self._publish()
        self._wake()

    def _publish(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            if self._table.expire(time.monotonic()):
                self._publish()
            await self._note_problems()


class IngressDeployment:
    """Answers requests of clients and polls of fronts, with ``fleet.ingress``. For the directory, it is one
    more front.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: bytes,
        models: bytes,
        secret: str,
        directory: DeploymentHandle,
        handles: Mapping[str, DeploymentHandle],
    ) -> None:
        decoded = msgspec.json.decode(settings, type=IngressSettings)
        http = _get_global_client().http_config
        refuse_without_key(decoded, http.host, http.port)
        self._secret = secret
        self._directory = directory
        listed = msgspec.json.decode(models, type=list[ListedModel])
        expected = tuple(ExpectedModel(model.id, model.aliases) for model in listed)
        membership = FleetMembership("Ray Serve", secret, expected, self._ask)
        forward = {model: _forward_to(handle) for model, handle in handles.items()}
        self._ingress = Ingress(decoded, listed, membership, forward)
        self._following = asyncio.get_running_loop().create_task(membership.run(), name="membership")

    async def __call__(self, request: Request) -> Response:
        if _is_poll(request):
            return await _answer_poll(request, self._secret, self._poll)
        return await self._ingress.answer(request)

    async def _poll(self, encoded: bytes) -> bytes:
        asking = self._directory.poll.remote(encoded)
        try:
            answer: bytes = await asking
        except BaseException:
            asking.cancel()
            raise
        return answer

    async def _ask(self, poll: Poll) -> Snapshot:
        try:
            return msgspec.json.decode(await self._poll(msgspec.json.encode(poll)), type=Snapshot)
        except Exception as error:  # Ray's handles raise many errors
            raise ValueError(f"{type(error).__name__}: {error}") from error


class _Answer:
    """A ``ReplicaAnswer`` through a Serve handle."""

    def __init__(self, response: DeploymentResponseGenerator[Any]) -> None:
        self._response = response

    async def assigned(self) -> None:
        # No public function tells it (2.60), and the first byte may come minutes later.
        await self._response._fetch_future_result_async()

    def __aiter__(self) -> AsyncIterator[Any]:
        found: AsyncIterator[Any] = self._response
        return found

    def cancel(self) -> None:
        self._response.cancel()


def _forward_to(handle: DeploymentHandle) -> Forward:
    """Over gRPC, not as objects of Ray's store: that takes a third of the CPU time for a chunk. Serve (2.60)
    buffers what a slow client has not read, without a limit, in the ingress and in the replica.
    """
    large = handle.options(method_name=FORWARD, stream=True)
    small = large.options(_by_reference=False)

    def forward(target: bytes, lines: bytes, body: bytes) -> ReplicaAnswer:
        fitting = small if len(body) <= _GRPC_BYTES else large
        return _Answer(fitting.remote(target, lines, body))

    return forward


# --- polls of fronts over HTTP -----------------------------------------------------------------------------


def _is_poll(request: Request) -> bool:
    path: str = request.scope["path"].removeprefix(request.scope.get("root_path", "") or "")
    return path == POLL_PATH


async def _answer_poll(request: Request, secret: str, poll: Callable[[bytes], Awaitable[bytes]]) -> Response:
    given, expected = request.headers.get("authorization", ""), f"Bearer {directory_key(secret)}"
    if not compare_digest(given.encode(), expected.encode()):
        return JSONResponse(_error("The key is not that of this fleet.", "authentication_error"), 401)
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_POLL:
            return JSONResponse(_error("The poll is too large.", "invalid_request_error"), 413)
    try:
        nonce = msgspec.json.decode(body, type=Poll).nonce
    except msgspec.DecodeError as error:
        return JSONResponse(_error(f"The poll is invalid: {error}.", "invalid_request_error"), 400)
    answer = await poll(body)
    headers = {SIGNATURE: signature(secret, nonce, answer)}
    return Response(answer, media_type="application/json", headers=headers)


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": None}}
