"""Requests to the control API through the proxy, whose path both of them read.

The proxy decides by the raw path, and the control application by the decoded one. Whatever the spelling, a
key must not get more than its right, and no key starts a program.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from llamasup.core.auth.keys import Keys
from llamasup.core.control.private_socket import THROUGH_PROXY
from llamasup.core.control.routes import Application
from llamasup.core.http.heads import Head, HttpError, RawHeaders, read_head
from llamasup.core.http.routes import CONTROL
from llamasup.core.observability.counters import Metrics
from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.live.requests import LiveRequests
from tests.core.control.fake import FakeControlTarget
from tests.core.proxy.key_files import keys_of
from tests.security.limited_key import served_as

__all__ = ["KEYS", "reaches_no_more_than_its_right"]

KEYS = (b"admin", b"admin", b"infer", b"node", b"")
_FILE = "infer\nnode rights=inference,node\nadmin rights=inference,control"


def reaches_no_more_than_its_right(method: bytes, path: bytes, key: bytes) -> str:
    """What became of the request, for statistics. Raises AssertionError."""
    policy = AccessPolicy(ProxyConfig(), Keys(keys_of(_FILE), (), lambda: 0.0))
    headers: RawHeaders = [(b"host", b"localhost"), (b"x-api-key", key)]
    head = read_head(method, path, "1.1", headers)
    if isinstance(head, HttpError) or isinstance(policy.authorize(head, "127.0.0.1"), HttpError):
        return "refused"
    if head.route is not CONTROL:
        assert not (served_as(head.path).lower() + b"/").startswith(b"/llamasup/"), path
        return "a model"
    assert key == b"admin", path
    assert not any(byte < 0x20 or byte == 0x7F for byte in unquote_to_bytes(head.path)), path
    if not head.path.isascii():
        return "refused"  # by uvicorn
    done = asyncio.run(_asked(head))
    assert not any(name == "upgrade" for name, *_ in done), path
    return "the control API"


async def _asked(head: Head) -> list[Any]:
    """What the application did for a request that the proxy forwards."""
    fake = FakeControlTarget()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": head.method_text,
        "path": unquote(head.path.decode("ascii")),  # as uvicorn does
        "raw_path": head.path,
        "query_string": head.query,
        "headers": [(b"host", b"localhost"), (THROUGH_PROXY, b"1")],
    }
    messages = [{"type": "http.request", "body": b'{"runtime": "/bin/true"}', "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_message: MutableMapping[str, Any]) -> None:
        pass

    async with asyncio.TaskGroup() as tasks:
        requests = LiveRequests(fake.connections, fake.query_slots)
        application = Application(
            fake, Metrics(), requests, fake.last_hour, tasks, own_log=fake.own_log, more_routes=fake.routes
        )
        await application.asgi(scope, receive, send)
        application.end()
    return list(fake.requests)
