"""Decides whether a request may be sent to another llama-server, and where it waits for one (S10)."""

from __future__ import annotations

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.token_counts import is_shared_full
from llamasup.core.proxy.backend import Backend
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import AnswerHead
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.queueing.suspects import POISON


def may_leave(request: Request, status: int, *, refused: bool) -> bool:
    """Whether another server may get the request. ``refused``: its server has refused it.

    ``status`` is 0 before the answer has begun. After that, only the rest of a kept stream may come from
    another server.
    """
    if not request.replayable or (status and (refused or request.kept_stream is None)):
        return False
    return request.second_try is None or not request.second_try.runs  # else the client gets the first answer


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
