"""The plan of an RPC worker (pure)."""

from __future__ import annotations

from llamasup.core.http.address import TcpAddress
from llamasup.core.llama_server.argv_builder import Reason
from llamasup.core.supervision.plan_protocol import FixedPlan


class WorkerPlan(FixedPlan, frozen=True, kw_only=True):
    """The plan of one generation of an RPC worker. ``limit_bytes``: as in ``WorkerLine``."""

    address: TcpAddress
    limit_bytes: int | None
    reasons: tuple[Reason, ...]
    ignores_sigpipe: bool = True  # rpc-server would end if a client disconnects early (b11434)
