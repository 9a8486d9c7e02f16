"""The model name that llama.cpp's own router (b11434) and llamasup read in the same request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from llamasup.core.http.requested_model import read_body
from tests.core.http.test_requested_model import form, part
from tests.real.bare_server import bare_server

PATH = "/v1/audio/transcriptions"
BOUNDARY = b"------------------------d74496d66958873e"


@pytest.fixture(scope="module")
def router(llama_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A router without models: its error for an unknown model quotes the name that it has read."""
    folder = tmp_path_factory.mktemp("router")
    (folder / "models").mkdir()
    with bare_server(llama_server, folder / "r.sock", "--models-dir", str(folder / "models")):
        transport = httpx.HTTPTransport(uds=str(folder / "r.sock"))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            yield client


def read_by(router: httpx.Client, *, body: bytes = b"", query: bytes = b"") -> str | None:
    """The model name that the router has read; None if it reports a missing one."""
    if body:
        kind = (
            f"multipart/form-data; boundary={BOUNDARY.decode()}" if body.startswith(b"--") else "text/plain"
        )
        answer = router.post(PATH, content=body, headers={"Content-Type": kind})
    else:
        answer = router.get("/slots?" + query.decode())
    assert answer.status_code == 400, answer.text
    message = json.loads(answer.content)["error"]["message"]
    if message == "model name is missing from the request":
        return None
    found = re.fullmatch(r"model '(.*)' not found", message)
    assert found, message
    return found[1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny"}',
        b'{"messages":[{"model":"within"}],"model":"org/repo:Q4_K_M"}',
        b'{"model":"first","model":"last"}',
        b'{"model":true,"model":"tiny"}',
        b'{"model":"tiny","model":7}',
        b'{"model":7}',
        b'{"model":null}',
        b'{"model":""}',
        b'{"model":["tiny"]}',
        b'{"Model":"tiny"}',
        b"{}",
        b'\xef\xbb\xbf{"model":"marked"}',
        b'{"model":"t\\u0069ny"}',
        '{"model":"größer"}'.encode(),
        form(part("file", bytes(9999), 'filename="a.wav"'), part("model", b"whisper")),
        form(part("model", b"whisper"), part("file", bytes(9999), 'filename="a.wav"')),
        form(part("model", b"plain", quoted=False)),
        form(part("model", b" spaced ")),
        form(part("model", b"a file", 'filename="model"')),
        form(part("models", b"x")),
    ],
    ids=lambda body: repr(body[-40:]),
)
def test_llamasup_and_the_router_read_the_same_model_name_in_a_body(
    router: httpx.Client, body: bytes
) -> None:
    assert read_body(body, b"", "other")[0] == read_by(router, body=body)


@pytest.mark.parametrize(
    "query",
    [b"model=tiny", b"a=b&model=org%2Frepo%3AQ4", b"model=a&model=b", b"model=a+b%20c", b"model=", b"x=y"],
)
def test_llamasup_and_the_router_read_the_same_model_name_in_a_query(
    router: httpx.Client, query: bytes
) -> None:
    assert read_body(b"", query, "other")[0] == read_by(router, query=query)


def test_repeated_model_field_counts_as_missing_for_the_router(router: httpx.Client) -> None:
    """llamasup uses the first one: to find a second one, it would have to read the file after it."""
    body = form(part("model", b"first"), part("model", b"second"))
    assert read_by(router, body=body) is None
    assert read_body(body, b"", "other")[0] == "first"
