"""Decides what follows when a llama-server fails: who gets the request then, and which error its client.

``queueing/suspects.py`` remembers which requests may have ended a server.
"""

from __future__ import annotations

import logging
from typing import Final

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.token_counts import is_shared_full
from llamasup.core.proxy.backend import Backend
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import AnswerHead
from llamasup.core.proxy.waiting import Waiting
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.queueing.suspects import POISON, Next, Suspects, next_step

TRANSIENT: Final = (ConnectionError, FileNotFoundError, BlockingIOError, TimeoutError)
"""The child or its socket file is gone, or its backlog is full. Supervision handles these."""

_log = logging.getLogger("llamasup.proxy")


# --- another llama-server (S10)


def queue_after(
    request: Request, endpoint: Endpoint, backend: Backend, *, refused: bool
) -> RequestQueue | None:
    """The queue in which a request waits that has left ``endpoint``; None: no other server may get it.

    A request that was ``refused`` goes only to another server, which may have to start first. The caller has
    ejected ``endpoint`` then, so that the backend can choose between this node and others.
    """
    route = backend.resolve(endpoint.model, local=request.head.from_node)
    if isinstance(route, HttpError):
        return None  # the model was removed from the configuration in the meantime
    if route.model.is_virtual:
        return None  # a virtual model hides it since then: its requests go to another model
    queue = route.served.queue
    replaced = endpoint.node is not None and endpoint.node.replaced
    return None if refused and not replaced and not queue.replaces(endpoint) else queue


def may_repeat(request: Request, *, sent: bool, has_ended: bool) -> bool:
    """Whether the request may be sent a second time. ``has_ended``: its server may have ended because of it,
    which a batch decides itself. A server that refuses has not ended.
    """
    return not sent or (not (request.is_batch and has_ended) and request.head.route.repeats)


def is_refusal_of_node(answer: AnswerHead, body: bytes) -> bool:
    """Whether this answer of another node lets a third one serve the request: its queue is full, it stops or
    cannot serve the model now, or our key is wrong. What has ended the servers of one node goes to no other.
    """
    return answer.status in (401, 429, 503) and POISON not in body


def is_crowded(answer: AnswerHead, lease: Lease, body: bytes) -> bool:
    """Whether the requests have filled the context that they share.

    A stream then begins with the error: its head came before the prompt was read.
    """
    may_be = answer.status == 500 or answer.streams_events
    return may_be and not lease.alone and is_shared_full(body)


# --- suspects


def suspects_of(request: Request, endpoint: Endpoint) -> Suspects | None:
    """The suspects of the model. None: another node decides, or no model has the request."""
    route = request.model_route
    return None if route is None or endpoint.node is not None else route.served.queue.suspects


def note_fingerprint(request: Request, endpoint: Endpoint) -> None:
    """Keep the fingerprint of a body that is about to be dropped."""
    suspects = suspects_of(request, endpoint)
    if suspects is not None:
        request.fingerprint = suspects.fingerprint(request.head.path, request.body)


def clear(request: Request, endpoint: Endpoint) -> None:
    """The server has answered, so the request ends no server."""
    if (suspects := suspects_of(request, endpoint)) is not None:
        suspects.clear(request.fingerprint)


def suspect(request: Request, endpoint: Endpoint, now: float, *, sent: bool) -> None:
    """Remember that the server has ended while it had the request, which llamasup does not send again."""
    suspects = suspects_of(request, endpoint)
    may_be_poison = sent and request.head.may_wait and (endpoint.crashed or not endpoint.closed)
    if suspects is not None and may_be_poison:
        suspects.suspect(_fingerprint(request, suspects), now, endpoint.explain)


def refuse_if_poison(
    request: Request,
    lease: Lease,
    waiting: Waiting | None,
    why: HttpError,
    now: float,
    *,
    sent: bool,
) -> HttpError | None:
    """The refusal of a request that has ended its server, for the second time and alone. None: it has not.

    ``waiting``: its wait before, if any. ``why``: the end of the server.
    """
    suspects = suspects_of(request, lease.endpoint)
    if suspects is None or not (lease.endpoint.crashed and sent):
        return None
    ends = () if request.suspicion is None else request.suspicion.ends
    if waiting is not None:
        ends = waiting.entry.ends
    if next_step(len(ends) + 1, alone=lease.alone) is not Next.REFUSED:
        return None
    for explain in ends:
        explain()
    _log.warning("request %s has ended llama-server twice, and is refused", request.id.decode())
    return suspects.refuse(_fingerprint(request, suspects), now, why)


def _fingerprint(request: Request, suspects: Suspects) -> bytes:
    return request.fingerprint or suspects.fingerprint(request.head.path, request.body)


# --- errors


def connect_failure(server: str, error: OSError | TimeoutError) -> HttpError:
    """No connection could be made."""
    if isinstance(error, TimeoutError):
        status, reason = 504, f"timeout while connecting to {server}"
    elif isinstance(error, (ConnectionRefusedError, FileNotFoundError, BlockingIOError)):
        status, reason = 503, f"{server} accepts no connections ({error.strerror or error})"
    else:
        status, reason = 502, f"{server} cannot be reached ({error.strerror or error})"
    return HttpError(status, reason, "unavailable_error", "upstream_unreachable", "try again shortly", 1.0)


def broken_answer(server: str, reason: str) -> HttpError:
    """The answer cannot be completed."""
    return HttpError(502, f"{server} {reason}", "server_error", "upstream_broke", "see llamasup's log")


def silent_answer(server: str, idle_s: float) -> HttpError:
    """The answer has made no progress for ``idle_s``."""
    reason = f"{server} has sent nothing for {idle_s:g} s"
    return HttpError(504, reason, "timeout_error", "upstream_idle", "try again")


def refused_key(server: str) -> HttpError:
    """Another node does not accept our key."""
    reason = f"{server} does not accept our key"
    return HttpError(502, reason, "server_error", "node_refused", "see llamasup's log")


def with_cause(error: HttpError, why: HttpError) -> HttpError:
    """The same error with the cause, once that is known."""
    return replace(error, message=why.message, cause=why.cause, remedy=why.remedy)
