"""The answer stages of the features. Each is imported by the first request that needs it: few models do."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from llamasup.core.observability.counters import Metrics
from llamasup.core.proxy.context import AnswerStages
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import Stage
from llamasup.core.settings.model import Repairs
from llamasup.features import only_attached


@cache
def _stage(seam: str) -> Any | None:
    return only_attached(seam)


def _repair(request: Request, repairs: Repairs, metrics: Metrics) -> None:
    repair = _stage("repair")
    if repair is not None:
        repair(request, repairs, metrics)


def _keep(request: Request, behind: Stage) -> Stage:
    keep = _stage("keep")
    kept: Stage = behind if keep is None else keep(request, behind)
    return kept


def _tools(request: Request) -> None:
    tools = _stage("tools")
    if tools is not None:
        tools(request)


ANSWER_STAGES: Final = AnswerStages(repair=_repair, keep=_keep, tools=_tools)
