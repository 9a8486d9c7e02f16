"""Clients hear what is wrong with a file, and nothing of where it lies."""

from __future__ import annotations

import pytest

from llamasup.core.places import without_places

KNOWN = ("/srv/my models/tiny.gguf", "/blobs/77ab", "/tiny.gguf")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/my models/tiny.gguf: truncated", "tiny.gguf: truncated"),
        ("'/srv/my models/tiny.gguf' is cut off", "'tiny.gguf' is cut off"),
        ("Did you mean '/srv/my models/small.gguf'?", "Did you mean 'small.gguf'?"),
        ("There is no other in /srv/my models.", "There is no other in its folder."),
        ("/blobs/77ab: may not be read", "77ab: may not be read"),
        ("/tiny.gguf: may not be read", "tiny.gguf: may not be read"),
        ("org/repo from https://host/org/repo at 3 MiB/s", "org/repo from https://host/org/repo at 3 MiB/s"),
        ("It needs 3 GiB", "It needs 3 GiB"),
    ],
)
def test_a_path_that_is_known_is_told_by_its_name(text: str, told: str) -> None:
    assert without_places(text, KNOWN) == told


@pytest.mark.parametrize(
    "text",
    [
        "/srv/my models/tiny.gguf: leads to /srv/secret place/none.gguf, which is in none of the folders",
        "2 files are called 'x': /a/x.gguf, /b/x.gguf",
        "(/opt/llama-server)",
        "~/models/x.gguf",
        "in /srv/my models-private",
        "in /srv/my models.old",
        "below /srv",
        "../x.gguf",
    ],
)
def test_of_what_names_another_place_nothing_is_told(text: str) -> None:
    assert without_places(text, KNOWN) == ""
