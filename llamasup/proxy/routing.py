"""Who serves a request: llama-server, by the model that it names, or llamasup's control API.

What a model's processes do, whether a request may wait for them, and how it is answered is for others to say.
"""

from __future__ import annotations

from llamasup.http.routes import CONTROL
from llamasup.proxy.gate import AccessPolicy
from llamasup.proxy.interfaces import ProxyContext
from llamasup.proxy.local import CONTROL_PATHS, access_denied
from llamasup.proxy.request import Request
from llamasup.queueing.endpoint import Lease, Unavailable

__all__ = ["lease_for"]


def lease_for(request: Request, door: AccessPolicy, proxy: ProxyContext) -> Lease | Unavailable:
    """The right to use what serves it (``Request.named``), or why there is none."""
    head = request.head
    if not door.rules.transparent and (head.route is CONTROL or head.path in CONTROL_PATHS):
        control = proxy.control
        if control is None or control.closed:
            return Unavailable(404, "there is no control API here", type="not_found_error")
        return control.lease()
    backend, key, model = proxy.backend, request.key, request.named
    limited = key is not None and bool(key.models)
    if limited or proxy.config.route_by_model:
        meant = backend.meant(model)
        if limited or (meant is not None and head.route.work not in meant.works):
            refusal = access_denied(request, meant)
            if refusal is not None:
                return Unavailable.because(refusal)
    return backend.lease(model, infers=request.needs_permit, body=request.body)
