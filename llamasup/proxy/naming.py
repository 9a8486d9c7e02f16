"""Whether a request may have the model that it means, and the list of those that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamasup.core.http import HttpError, error_response, response
from llamasup.core.meant_model import MeantModel, forbidden_model, may_use, unfit_model, unnamed_model
from llamasup.core.requested_model import named_in_path
from llamasup.runtime.endpoint import Unavailable

if TYPE_CHECKING:
    from llamasup.core.model_listing import ModelListing
    from llamasup.proxy.request import Request
    from llamasup.runtime.endpoint import Backend

__all__ = ["answer_listing", "misused"]


def misused(request: Request, meant: MeantModel | None) -> HttpError | None:
    """Why the request may not have the model that it means. None: nothing here speaks against it.

    What means no model at all is for the backend to refuse, unless its key must not learn which there are.
    """
    key = request.key
    if key is not None and key.models and (meant is None or not may_use(key, meant)):
        if meant is None and request.named is None:
            return unnamed_model(key.models)
        return forbidden_model(key, request.named)
    work = request.head.route.work
    if meant is not None and work is not None and work not in meant.works and request.needs_place:
        return unfit_model(meant, work)
    return None


def answer_listing(
    request: Request, listing: ModelListing, backend: Backend, *, close: bool
) -> tuple[int, bytes]:
    """Status and whole response for ``/v1/models`` and ``/v1/models/{id}``."""
    head, lines, key = request.head, request.response_lines, request.key
    if head.method not in (b"GET", b"HEAD"):
        error = HttpError(405, "the list of models is read with GET")
        return 405, error_response(error, b"Allow: GET, HEAD\r\n", lines, close=close)
    name = named_in_path(head.path)
    if name is None:
        allowed = (lambda meant: may_use(key, meant)) if key is not None and key.models else None
        return 200, response(200, listing.all(allowed), lines, method=head.method, close=close)
    request.named = name
    meant = backend.meant(name)
    refusal = misused(request, meant)
    if refusal is None and meant is None:
        why = backend.lease(name)
        assert isinstance(why, Unavailable)
        refusal = why.as_error()
    if refusal is not None:
        return refusal.status, error_response(refusal, lines, method=head.method, close=close)
    assert meant is not None
    return 200, response(200, listing.one(meant.id), lines, method=head.method, close=close)
