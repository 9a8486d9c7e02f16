"""The plan of an RPC worker (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llamasup.gguf.facts import ModelClass
from llamasup.http.address import TcpAddress
from llamasup.llama_server.argv_builder import Reason
from llamasup.llama_server.plan_limits import Reduction
from llamasup.llama_server.slots.policy import KeptSlots

__all__ = ["WorkerPlan"]


class WorkerPlan(Struct, frozen=True):
    """How to start one generation (a ``ChildPlan``). ``limit_bytes``: as in ``WorkerLine``."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: TcpAddress
    limit_bytes: int | None
    reasons: tuple[Reason, ...]
    api_key: str | None = None
    model_class: ModelClass = ModelClass.DECODER
    checked: bool = False
    parallel: int | None = None
    ctx_size: int | None = None
    slots: KeptSlots | None = None
    nice: int | None = None
    ignores_sigpipe: bool = True  # rpc-server would end if a client disconnects early (b11434)
    device: str | None = None
    reduced: tuple[Reduction, ...] = ()
    workers: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()
