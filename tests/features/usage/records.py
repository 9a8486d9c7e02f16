"""Finished requests for the tests of the usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from llamasup.core.observability.counters import RequestRecord
from llamasup.features.usage.ledger import Group, Sums
from llamasup.features.usage.report import read_by, report
from tests.core.control.fake import FakeControlTarget

__all__ = ["record"]

_PLAIN = RequestRecord(
    request_id="r",
    method="POST",
    path="/completion",
    route="/completion",
    model="tiny",
    generation=1,
    status=200,
    tokens_prompt=10,
    tokens_cached=4,
    tokens_completion=5,
    tokens_per_s=100.0,
    queue_s=0.0,
    first_byte_s=0.1,
    duration_s=2.0,
    bytes_out=300,
    outcome="ok",
    client="127.0.0.1",
    ended_s=1000.0,
    slot_s=1.5,
)


def record(**changes: Any) -> RequestRecord:
    """A request for ``tiny`` with 10 tokens of prompt (4 of them cached) and 5 of answer, unless changed."""
    return replace(_PLAIN, **changes)


def counting(problem: str | None = None) -> FakeControlTarget:
    """A target with a row for each model, and an error for an unknown group."""
    fake = FakeControlTarget()

    async def usage(by: str, since: str | None) -> Mapping[str, Any]:
        fake.requests.append(("usage", f"{by} {since}"))
        groups = read_by(by)
        rows = [(Group("2026-03-01", name, "phone"), Sums(2, 1, 20, 8, 10)) for name in fake.names]
        return report(rows, groups, None, file="/state/usage.sqlite", problem=problem)

    fake.usage = usage
    return fake
