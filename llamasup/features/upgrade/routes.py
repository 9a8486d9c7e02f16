"""The path ``upgrade`` of the control API (docs/control.md)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamasup.core.control.interface import ControlTarget, Host
from llamasup.core.control.json_body import PREFIX, is_from_proxy, json_answer, read_body

_REFUSAL = {
    "message": "an upgrade is closed through this address, because it starts a program of the machine",
    "type": "permission_error",
    "code": 403,
    "cause": "control_closed",
    "remedy": "use `llamasup upgrade` on that machine",
}


class _UpgradeRequest(msgspec.Struct):
    runtime: str
    dry_run: bool = False


def routes(host: Host, target: ControlTarget) -> Sequence[Route]:
    async def show(request: Request) -> Response:
        return json_answer(target.upgrade_status())

    async def upgrade(request: Request) -> Response:
        """Upgrade, even if the client disconnects."""
        if is_from_proxy(request):
            return json_answer({"error": _REFUSAL}, 403)
        asked = await read_body(request, _UpgradeRequest)
        return json_answer(await target.upgrade(asked.runtime, dry_run=asked.dry_run))

    path = f"{PREFIX}/upgrade"
    return [Route(path, show, methods=["GET"]), Route(path, upgrade, methods=["POST"])]
