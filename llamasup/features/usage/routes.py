"""The path ``usage`` of the control API (docs/control.md)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamasup.core.control.interface import ControlTarget, Host
from llamasup.core.control.json_body import PREFIX, json_answer


def routes(host: Host, target: ControlTarget) -> Sequence[Route]:
    async def show(request: Request) -> Response:
        query = request.query_params
        return json_answer(await host.usage(query.get("by", "model"), query.get("since")))

    return [Route(f"{PREFIX}/usage", show, methods=["GET"])]
