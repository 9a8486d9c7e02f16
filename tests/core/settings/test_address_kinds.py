"""The kinds of values that are addresses and hosts."""

from __future__ import annotations

import pytest

from llamasup.core.http.address import ANY_HOST
from llamasup.core.settings.kinds import InvalidValue, MediaHost, ProxyAddress


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", ANY_HOST), ("True", ANY_HOST), ("false", ""), ("CDN.example.net", "cdn.example.net")],
)
def test_media_host_is_one_host_or_a_word(text: str, value: str) -> None:
    assert MediaHost().parse(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("unix", "unix"), ("10.0.0.1", "10.0.0.1/32"), ("10.1.2.3/8", "10.0.0.0/8"), ("::1", "::1/128")],
)
def test_proxy_is_an_address_a_network_or_unix(text: str, value: str) -> None:
    assert ProxyAddress().parse(text) == value


@pytest.mark.parametrize("text", ["", "nginx", "10.0.0.1:80", "10.0.0.0/33", "*"])
def test_other_texts_are_no_proxy(text: str) -> None:
    with pytest.raises(InvalidValue):
        ProxyAddress().parse(text)
