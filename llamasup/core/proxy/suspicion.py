"""Decides what is remembered of a request whose llama-server has ended (``queueing/suspects.py``)."""

from __future__ import annotations

import logging
from time import monotonic

from llamasup.core.http.heads import HttpError
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.waiting import Waiting
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.suspects import Next, Suspects, next_step

_log = logging.getLogger("llamasup.proxy")


def suspects_of(request: Request, endpoint: Endpoint) -> Suspects | None:
    """The suspects of the model. None: another node decides, or no model has the request."""
    route = request.model_route
    return None if route is None or endpoint.node is not None else route.served.queue.suspects


def note_fingerprint(request: Request, endpoint: Endpoint) -> None:
    """Keep the fingerprint of a body that is about to be dropped."""
    suspects = suspects_of(request, endpoint)
    if suspects is not None:
        request.fingerprint = suspects.fingerprint(request.head.path, request.body)


def suspect(request: Request, endpoint: Endpoint, *, sent: bool) -> None:
    """Remember that the server has ended while it had the request, which llamasup does not send again."""
    suspects = suspects_of(request, endpoint)
    may_be_poison = sent and request.head.may_wait and (endpoint.crashed or not endpoint.closed)
    if suspects is not None and may_be_poison:
        suspects.suspect(_fingerprint(request, suspects), monotonic(), endpoint.explain)


def refuse_if_poison(
    request: Request, lease: Lease, waiting: Waiting | None, why: HttpError, *, sent: bool
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
    return suspects.refuse(_fingerprint(request, suspects), monotonic(), why)


def _fingerprint(request: Request, suspects: Suspects) -> bytes:
    return request.fingerprint or suspects.fingerprint(request.head.path, request.body)
