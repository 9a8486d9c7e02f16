"""Which URLs llama-server may fetch."""

from __future__ import annotations

import pytest

from llamasup.core.http.media_policy import refused_media

ALLOWED = ("good.example", "10.0.0.5:8000", "[fd00::1]")


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example/x.png",
        "https://good.example",
        "https://GOOD.example:443/a/b?c=d&e=%20#f",
        "http://good.example:80/",
        "http://10.0.0.5:8000/x",
        "https://10.0.0.5:8000/x",
        "http://[fd00::1]/x",
    ],
)
def test_a_plain_url_of_an_allowed_host_passes(url: str) -> None:
    assert refused_media([url], ALLOWED) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://bad.example/x",
        "http://good.example.bad.example/",
        "http://bad.example/good.example",
        "http://good.example:8080/",  # another port is another server
        "http://good.example:443/",
        "http://10.0.0.5/",
        "http://user@good.example/",
        "http://good.example@bad.example/",
        "http://good.example/@bad.example/",  # llama-server takes all before it for a user
        "http://good.example/x?y=@bad.example/",
        "http://good.example\\@bad.example/",
        "http://good.example\\x",
        "http://good.example#.bad.example/",
        "http://good.example?.bad.example/",
        "http://good.example. /",
        "http://good.example./",
        "http://good.example:/",
        "http://good.example:080/",
        "http://good.example/a b",
        "http://good.example/\r\nHost: bad.example",
        "http://good.example/\u00e9",
        "http:good.example",
        "http:/good.example/",
        "http:///good.example/",
        "HTTP://good.example/",
        "httpx://good.example/",
        " http://good.example/",
        "http",
        None,
    ],
)
def test_any_other_host_and_every_ambiguous_url_is_refused(url: str | None) -> None:
    error = refused_media(["http://good.example/", url], ALLOWED)
    assert error is not None
    assert (error.status, error.cause) == (400, "remote_media")


def test_refusal_names_the_host_and_the_remedy() -> None:
    error = refused_media(["http://169.254.169.254/latest/meta-data/"], ())
    assert error is not None
    assert "'169.254.169.254'" in error.message
    assert "latest" not in error.message
    assert "data: URL" in error.remedy
    assert "http.remote_media" in error.remedy
    with_port = refused_media(["http://localhost:8080/"], ())
    unreadable = refused_media(["http://a@b/"], ())
    long = refused_media(["http://" + "a" * 5000], ())
    assert with_port is not None
    assert unreadable is not None
    assert long is not None
    assert "'localhost:8080'" in with_port.message
    assert "a remote URL" in unreadable.message
    assert len(long.message) < 300
