"""The answer stages of the features. Each is imported by the first request that needs it: few models do."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from llamasup.core.observability.counters import Metrics
from llamasup.core.proxy.interfaces import AnswerStages, ClientConnection
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import KeptStream
from llamasup.core.settings.repairs import Repairs
from llamasup.features import attached


@cache
def _stages(seam: str) -> tuple[Any, ...]:
    return tuple(attached(seam))


def _repair(request: Request, repairs: Repairs, metrics: Metrics) -> None:
    for repair in _stages("repair"):
        repair(request, repairs, metrics)


def _keep(
    downstream: ClientConnection, request: Request, sent_at: float, first_byte_at: float
) -> KeptStream | None:
    for keep in _stages("keep"):
        kept: KeptStream | None = keep(downstream, request, sent_at, first_byte_at)
        return kept
    return None


ANSWER_STAGES: Final = AnswerStages(repair=_repair, keep=_keep)
