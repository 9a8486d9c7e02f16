"""The path ``upgrade`` of the control API."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from llamasup.errors import BuildRefused
from tests.core.control.fake import AsyncControlClient, FakeControlTarget, served
from tests.core.control.test_routes import run


@pytest.mark.check("X4", "403 for every key")
def test_no_path_reaches_an_upgrade_through_the_proxy(tmp_path: Path) -> None:
    """Each byte, encoded, before and after the path and its last part."""
    path = "/llamasup/v1/upgrade"
    encoded = [f"%{byte:02x}" for byte in range(256)]
    spellings = [path, f"{path}?x=1", "/llamasup/v1/%75pgrade", f"{path}/", f"/{path}", f"//llamasup{path}"]
    spellings += [
        text for byte in encoded for text in (path + byte, f"/llamasup/v1/{byte}upgrade", byte + path)
    ]

    async def visit() -> None:
        async with served(fake := FakeControlTarget(), tmp_path) as (_, socket_path):
            transport = httpx.AsyncHTTPTransport(uds=socket_path)
            forwarded = {"X-Llamasup-Through-Proxy": "1"}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                for method in ("POST", "PUT"):
                    for spelling in spellings:
                        body = {"runtime": "/bin/true"}
                        answer = await http.request(method, spelling, json=body, headers=forwarded)
                        assert answer.status_code in {403, 404, 405}, (spelling, answer.text)
                assert (await http.post(path, json=body, headers=forwarded)).json()["error"][
                    "cause"
                ] == "control_closed"
                assert fake.requests == []
                assert (await http.post(f"{path}%0a", json=body)).status_code == 404
                assert (await http.post(path, json=body)).status_code == 200
            assert fake.requests == [("upgrade", "/bin/true")]

    asyncio.run(visit())


def test_upgrade_is_answered_at_its_end(tmp_path: Path) -> None:
    async def visit(fake: FakeControlTarget, client: AsyncControlClient) -> None:
        assert (await client.upgrade())["state"] == "none"
        assert (await client.upgrade("/new/llama-server"))["state"] == "watching"
        fake.error = BuildRefused("It is slow.", remedy="Use another build.")
        with pytest.raises(BuildRefused, match="It is slow"):
            await client.upgrade("/new/llama-server")
        assert fake.requests == [("upgrade", "/new/llama-server")] * 2

    run(tmp_path, visit)
