"""The kinds of values that are addresses and hosts."""

from __future__ import annotations

import pytest

from llamasup.http.address import ANY_HOST
from llamasup.settings.address_kinds import MediaHost


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", ANY_HOST), ("True", ANY_HOST), ("false", ""), ("CDN.example.net", "cdn.example.net")],
)
def test_media_host_is_one_host_or_a_word(text: str, value: str) -> None:
    assert MediaHost().parse(text) == value
