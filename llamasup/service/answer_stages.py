"""The answer stages of the features. Each is imported by the first request that needs it: few models do."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

from llamasup.core.proxy.context import AnswerStages
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import Stage
from llamasup.features import only_attached


@cache
def _stage(seam: str) -> Any | None:
    return only_attached(seam)


def _call(seam: str, *arguments: Any) -> Any:
    stage = _stage(seam)
    return None if stage is None else stage(*arguments)


def _keep(request: Request, behind: Stage) -> Stage:
    keep = _stage("keep")
    kept: Stage = behind if keep is None else keep(request, behind)
    return kept


ANSWER_STAGES: Final = AnswerStages(partial(_call, "repair"), _keep, partial(_call, "tools"))
