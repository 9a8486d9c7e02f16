"""The private address of the control API, also where Python has no Unix sockets (Windows)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.control.private_socket import listen, reach, with_key
from llamasup.core.http.address import TcpAddress
from llamasup.core.system.native import native


def test_without_unix_sockets_the_file_holds_port_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_unix_sockets", False)
    path = tmp_path / "control.sock"
    listening = listen(path)
    with listening.sock:
        assert isinstance(listening.address, TcpAddress)
        reached = reach(str(path))
        assert reached.url == listening.address.url
        assert reached.headers == {"authorization": f"Bearer {listening.key}"}
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"[]", b'{"port": "x", "key": "k"}', b'{"port": 1}'])
def test_a_file_without_an_address_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_unix_sockets", False)
    path = tmp_path / "control.sock"
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"holds no address"):
        reach(str(path))


@pytest.mark.parametrize(("given", "status"), [(b"Bearer right", 200), (b"Bearer wrong", 401), (b"", 401)])
def test_requests_need_the_key(given: bytes, status: int) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    scope = {"type": "http", "headers": [(b"authorization", given)]}
    asyncio.run(with_key(application, "right")(scope, None, send))
    assert sent[0]["status"] == status
