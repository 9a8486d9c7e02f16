"""Which llamasup a command talks to, by its options."""

from __future__ import annotations

import pytest

from llamasup.cli.commands.control import reach
from llamasup.errors import UsageInvalid


@pytest.mark.check("X13", "refused, and not shown")
@pytest.mark.parametrize("url", ["http://ann:secret@h:8080", "ann:secret@h", "https://secret@h/x"])
def test_a_url_with_a_password_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageInvalid, match="name or a password") as caught:
        reach(pid=None, url=url, api_key_file=None)
    assert "secret" not in f"{caught.value} {caught.value.remedy}"


def test_a_url_may_go_without_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASUP_API_KEY", "k" * 32)
    place = reach(pid=None, url="h:8080", api_key_file=None)
    assert (place.url, place.socket, place.api_key) == ("http://h:8080", None, "k" * 32)
