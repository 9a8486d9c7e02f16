"""What may be allowed in Host, in Origin and in URLs of media."""

from __future__ import annotations

import pytest

from llamasup.errors import UsageInvalid
from llamasup.http.address import ANY_HOST, allowed_host, allowed_media_host, allowed_origin


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llm.example.net", "llm.example.net"),
        ("LLM.Example.net.", "llm.example.net"),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("[fd00::1]", "fd00::1"),
    ],
)
def test_a_host_is_a_name_or_an_address(text: str, name: str) -> None:
    assert allowed_host(text) == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("*", "DNS rebinding"),
        ("*.example.net", "DNS rebinding"),
        ("llm.example.net:8080", "has a port"),
        ("[fd00::1]:80", "has a port"),
        ("http://llm.example.net", "not a host name"),
        ("a/b", "not a host name"),
        ("a b", "not a host name"),
        ("bücher.example", "not a host name"),
        ("", "not a host name"),
    ],
)
def test_what_is_no_host_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageInvalid, match=said):
        allowed_host(text)


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://chat.example.net", "https://chat.example.net"),
        ("HTTPS://Chat.example.net:443", "https://chat.example.net"),
        ("https://chat.example.net:80", "https://chat.example.net:80"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://a:80", "http://a"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("tauri://localhost", "tauri://localhost"),
    ],
)
def test_an_origin_is_spelled_as_browsers_send_it(text: str, origin: str) -> None:
    assert allowed_origin(text) == origin


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("*", "every web page"),
        ("https://*.example.net", "every web page"),
        ("null", "not an origin"),
        ("chat.example.net", "not an origin"),
        ("https://chat.example.net/", "not an origin"),
        ("https://chat.example.net/app", "not an origin"),
        ("https://", "not an origin"),
        ("https://a:99999", "not an origin"),
        ("://a", "not an origin"),
        ("https://bücher.example", "not an origin"),
    ],
)
def test_what_is_no_origin_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageInvalid, match=said):
        allowed_origin(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("CDN.example.net", "cdn.example.net"),
        ("10.0.0.5:8000", "10.0.0.5:8000"),
        ("[FD00::1]:80", "[fd00::1]:80"),
        ("[fd00::1]", "[fd00::1]"),
        ("any", ANY_HOST),
    ],
)
def test_a_media_host_may_have_a_port(text: str, host: str) -> None:
    assert allowed_media_host(text) == host


@pytest.mark.parametrize("text", ["*", "*.example", "http://a", "a/b", "a@b", "a:99999", "a:", ""])
def test_an_invalid_media_host_is_refused(text: str) -> None:
    with pytest.raises(UsageInvalid, match="is not a valid media host"):
        allowed_media_host(text)
