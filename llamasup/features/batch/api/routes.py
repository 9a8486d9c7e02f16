"""The HTTP routes of the API for files and batches, and of the control API for the batches of all clients.

The proxy checks the access, and names the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from llamasup.core.control.json_body import json_answer, read_body
from llamasup.core.control.private_socket import client_of
from llamasup.errors import UsageInvalid
from llamasup.features.batch.api.objects import NewBatch, StoredBatch, batch_object, file_object, page
from llamasup.features.batch.api.service import BatchService

_MAX_PAGE: Final = {"files": 10_000, "batches": 100}
_PAGE: Final = {"files": 10_000, "batches": 20}


def routes_of(service: BatchService) -> Sequence[Route]:
    async def upload(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        try:
            file = await service.upload(_owner(request), content_type, request.stream())
        except ClientDisconnect:
            return Response(status_code=499)
        return json_answer(file_object(file))

    async def files(request: Request) -> Response:
        limit = _limit(request, "files")
        query = request.query_params
        found = await service.files(
            _owner(request),
            after=query.get("after"),
            limit=limit + 1,
            purpose=query.get("purpose"),
            oldest_first=query.get("order") == "asc",
        )
        return _page([file_object(file) for file in found], limit)

    async def file(request: Request) -> Response:
        return json_answer(file_object(await service.file(_owner(request), request.path_params["id"])))

    async def content(request: Request) -> Response:
        path = await service.content_path(_owner(request), request.path_params["id"])
        return FileResponse(path, media_type="application/octet-stream", headers=_FRESH)

    async def delete(request: Request) -> Response:
        id_ = request.path_params["id"]
        await service.delete(_owner(request), id_)
        return json_answer({"id": id_, "object": "file", "deleted": True})

    async def create(request: Request) -> Response:
        asked = await read_body(request, NewBatch)
        return json_answer(batch_object(await service.create(_owner(request), asked)))

    async def batches(request: Request) -> Response:
        limit = _limit(request, "batches")
        after = request.query_params.get("after")
        found = await service.batches(_owner(request), after=after, limit=limit + 1)
        return _page([batch_object(batch) for batch in found], limit)

    async def batch(request: Request) -> Response:
        return json_answer(batch_object(await service.batch(_owner(request), request.path_params["id"])))

    async def cancel(request: Request) -> Response:
        return json_answer(batch_object(await service.cancel(_owner(request), request.path_params["id"])))

    async def batches_of_all(request: Request) -> Response:
        found = await service.batches_of_all(_limit(request, "batches", default=_MAX_PAGE["batches"]))
        return json_answer({"batches": [_for_operators(batch) for batch in found]})

    async def cancel_of_any(request: Request) -> Response:
        return json_answer(_for_operators(await service.cancel(None, request.path_params["id"])))

    table: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...] = (
        ("POST", "/v1/files", upload),
        ("GET", "/v1/files", files),
        ("GET", "/v1/files/{id}", file),
        ("GET", "/v1/files/{id}/content", content),
        ("DELETE", "/v1/files/{id}", delete),
        ("POST", "/v1/batches", create),
        ("GET", "/v1/batches", batches),
        ("GET", "/v1/batches/{id}", batch),
        ("POST", "/v1/batches/{id}/cancel", cancel),
        ("GET", _CONTROL, batches_of_all),
        ("POST", _CONTROL + "/{id}/cancel", cancel_of_any),
    )
    return [Route(path, handler, methods=[method]) for method, path, handler in table]


_CONTROL: Final = "/llamasup/v1/batches"
_FRESH: Final = {"cache-control": "no-store"}


def _owner(request: Request) -> str:
    return client_of(request.headers)


def _for_operators(batch: StoredBatch) -> Mapping[str, Any]:
    """Return the object with the name of its client, and without what the client wrote about it."""
    shown = {**batch_object(batch), "client": batch.owner}
    del shown["metadata"]
    return shown


def _limit(request: Request, of: str, *, default: int | None = None) -> int:
    """Raises UsageInvalid."""
    text = request.query_params.get("limit")
    if text is None:
        return _PAGE[of] if default is None else default
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and 1 <= int(text) <= _MAX_PAGE[of]):
        raise UsageInvalid(f"limit={text[:40]!r} is not a valid value.", remedy=f"Use 1 to {_MAX_PAGE[of]}.")
    return int(text)


def _page(objects: Sequence[Mapping[str, Any]], limit: int) -> Response:
    """Answer with a page. ``objects`` has one more than the page if there are more."""
    return json_answer(page(objects[:limit], has_more=len(objects) > limit))
