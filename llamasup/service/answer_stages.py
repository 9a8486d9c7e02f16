"""The answer stages of the features. Each is imported by the first request that needs it: few models do."""

from __future__ import annotations

from typing import Final

from llamasup.core.observability.counters import Metrics
from llamasup.core.proxy.interfaces import AnswerStages, ClientConnection
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import KeptStream
from llamasup.core.settings.repairs import Repairs


def _repair(request: Request, repairs: Repairs, metrics: Metrics) -> None:
    from llamasup.features.repair.second_try import repair

    repair(request, repairs, metrics)


def _keep(
    downstream: ClientConnection, request: Request, sent_at: float, first_byte_at: float
) -> KeptStream | None:
    from llamasup.features.continuation.continued_stream import keep

    return keep(downstream, request, sent_at, first_byte_at)


ANSWER_STAGES: Final = AnswerStages(repair=_repair, keep=_keep)
