"""The path ``usage`` of the control API."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.control.client import ControlClient
from llamasup.errors import UsageInvalid
from tests.core.control.fake import FakeControlTarget
from tests.core.control.test_routes import client_of, raw
from tests.features.usage.records import counting


def test_usage_has_a_row_for_each_group(tmp_path: Path) -> None:
    def visit(fake: FakeControlTarget, client: ControlClient) -> None:
        assert [row["model"] for row in client.usage()["rows"]] == ["org/repo:q8_0", "tiny"]
        answer = client.usage("day,key", "2026-03-01")
        assert (answer["by"], answer["problem"]) == (["day", "key"], None)
        assert [(row["day"], row["key"], row["requests"]) for row in answer["rows"]] == [
            ("2026-03-01", "phone", 4)
        ]
        with pytest.raises(UsageInvalid, match="'week'"):
            client.usage("week")
        asked = [("usage", "model None"), ("usage", "day,key 2026-03-01"), ("usage", "week None")]
        assert fake.requests == asked

    client_of(tmp_path, visit, counting)


def test_usage_is_grouped_by_model_unless_the_query_says_more(tmp_path: Path) -> None:
    plain, invalid, posted = raw(
        tmp_path,
        ("GET", "/llamasup/v1/usage"),
        ("GET", "/llamasup/v1/usage?by=prompt"),
        ("POST", "/llamasup/v1/usage"),
        fake=counting(),
    )
    assert plain.json()["by"] == ["model"]
    assert (invalid.status_code, invalid.json()["error"]["cause"]) == (400, "usage")
    assert posted.status_code == 405
