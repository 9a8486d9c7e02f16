"""The routes for memory, plans, the last hour and the config, over a real socket and without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamasup.core.control.interface import ConfigMistakes
from llamasup.core.control.json_body import MAX_BYTES
from llamasup.errors import Conflict
from tests.core.control.fake import FakeControlTarget, served

V1 = "/llamasup/v1"
OF_CLIENT = {"X-Llamasup-Through-Proxy": "1"}
WITH_BODY = [("PUT", "/config"), ("POST", "/config/check"), ("POST", "/plan")]


class FakeConfig:
    """A config whose text is valid unless it contains ``bad``."""

    def __init__(self) -> None:
        self.text = "old"
        self.trusted: list[bool] = []

    async def show(self) -> Mapping[str, Any]:
        return {"file": "/c.yaml", "text": self.text, "version": self.text, "writable": True}

    async def check(self, text: str, *, trusted: bool) -> Mapping[str, Any]:
        self.trusted.append(trusted)
        mistakes = [{"line": 1, "key": "x", "message": "bad"}] if "bad" in text else []
        return {"ok": not mistakes, "mistakes": mistakes, "changes": None if mistakes else {}}

    async def replace(self, text: str, version: str, *, trusted: bool) -> Mapping[str, Any]:
        if version != self.text:
            raise Conflict("The config has changed since this text was read.")
        if mistakes := (await self.check(text, trusted=trusted))["mistakes"]:
            raise ConfigMistakes("/c.yaml", mistakes)
        self.text = text
        return {"changed": ["tiny"]}


def asked(
    fake: FakeControlTarget,
    folder: Path,
    *requests: tuple[str, str, Any],
    headers: Mapping[str, str] | None = None,
) -> list[httpx.Response]:
    """The answers to (method, path, body)."""

    async def all_of_them() -> list[httpx.Response]:
        async with served(fake, folder) as (_, path):
            transport = httpx.AsyncHTTPTransport(uds=path)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://localhost{V1}") as http:
                return [
                    await http.request(method, target, content=_content(body), headers=headers)
                    for method, target, body in requests
                ]

    return asyncio.run(all_of_them())


def _content(body: Any) -> bytes | None:
    return body if isinstance(body, bytes | None) else json.dumps(body).encode()


@pytest.fixture
def fake() -> FakeControlTarget:
    fake = FakeControlTarget()
    fake.config_access = FakeConfig()
    return fake


def test_memory_and_plan_are_those_of_the_service(fake: FakeControlTarget, tmp_path: Path) -> None:
    memory, plan, plain, unknown = asked(
        fake,
        tmp_path,
        ("GET", "/memory", None),
        ("POST", "/plan", {"model": "tiny", "settings": {"ctx_size": 512}}),
        ("POST", "/plan", {"model": "tiny"}),
        ("POST", "/plan", {"model": "nosuch"}),
    )
    assert memory.json() == {"devices": [{"name": "ram"}]}
    assert memory.headers["cache-control"] == "no-store"
    assert plan.json() == {"model": "tiny", "settings": {"ctx_size": 512}, "evicts": []}
    assert plain.json()["settings"] == {}
    assert (unknown.status_code, unknown.json()["error"]["cause"]) == (404, "model_not_found")


@pytest.mark.check("X15", "403; a plan connects to no host")
def test_plan_for_a_client_names_no_hosts(fake: FakeControlTarget, tmp_path: Path) -> None:
    plan = ("POST", "/plan", {"model": "tiny", "settings": {"ctx_size": 512, "rpc": ["10.0.0.1:1"]}})
    (answer,) = asked(fake, tmp_path, plan, headers=OF_CLIENT)
    assert (answer.status_code, answer.json()["error"]["cause"]) == (403, "not_allowed")


def test_plan_of_the_private_socket_may_name_hosts(fake: FakeControlTarget, tmp_path: Path) -> None:
    plan = ("POST", "/plan", {"model": "tiny", "settings": {"rpc": ["10.0.0.1:1"]}})
    assert asked(fake, tmp_path, plan)[0].status_code == 200


def test_history_has_the_times_of_its_steps(fake: FakeControlTarget, tmp_path: Path) -> None:
    (answer,) = asked(fake, tmp_path, ("GET", "/history", None))
    history = answer.json()
    assert history["step_s"] == 10
    assert {name: len(values) for name, values in history["series"].items()} == dict.fromkeys(
        ("time", "tokens_per_s", "queued", "first_byte_s", "memory_bytes"), 360
    )
    first, second = (datetime.fromisoformat(at) for at in history["series"]["time"][:2])
    assert abs((second - first).total_seconds() - 10) <= 1  # shown in whole seconds
    assert history["series"]["memory_bytes"][-1] == 7


def test_config_is_shown_checked_and_replaced(fake: FakeControlTarget, tmp_path: Path) -> None:
    before, check, changed, after = asked(
        fake,
        tmp_path,
        ("GET", "/config", None),
        ("POST", "/config/check", {"text": "new"}),
        ("PUT", "/config", {"text": "new", "version": "old"}),
        ("GET", "/config", None),
    )
    assert before.json() == {"file": "/c.yaml", "text": "old", "version": "old", "writable": True}
    assert check.json() == {"ok": True, "mistakes": [], "changes": {}}
    assert (changed.status_code, changed.json()) == (200, {"changed": ["tiny"]})
    assert after.json()["text"] == "new"


@pytest.mark.parametrize(("headers", "trusted"), [({}, True), (OF_CLIENT, False)])
def test_only_requests_of_the_private_socket_are_trusted(
    fake: FakeControlTarget, tmp_path: Path, headers: Mapping[str, str], trusted: bool
) -> None:
    changes = [
        ("PUT", "/config", {"text": "new", "version": "old"}),
        ("POST", "/config/check", {"text": "x"}),
    ]
    asked(fake, tmp_path, *changes, headers=headers)
    assert isinstance(fake.config_access, FakeConfig)
    assert fake.config_access.trusted == [trusted, trusted]


def test_stale_version_and_invalid_text_change_nothing(fake: FakeControlTarget, tmp_path: Path) -> None:
    stale, none, invalid, after = asked(
        fake,
        tmp_path,
        ("PUT", "/config", {"text": "new", "version": "older"}),
        ("PUT", "/config", {"text": "new"}),
        ("PUT", "/config", {"text": "bad", "version": "old"}),
        ("GET", "/config", None),
    )
    assert [answer.status_code for answer in (stale, none, invalid)] == [409, 409, 400]
    assert stale.json()["error"]["cause"] == "conflict"
    assert invalid.json()["error"]["cause"] == "config_invalid"
    assert invalid.json()["mistakes"] == [{"line": 1, "key": "x", "message": "bad"}]
    assert after.json()["text"] == "old"


def test_service_without_a_config_file_shows_none(tmp_path: Path) -> None:
    shown, check, change = asked(
        FakeControlTarget(),
        tmp_path,
        ("GET", "/config", None),
        ("POST", "/config/check", {"text": ""}),
        ("PUT", "/config", {"text": "", "version": ""}),
    )
    assert shown.json() == {"file": None, "text": "", "version": "", "writable": False}
    assert [answer.status_code for answer in (check, change)] == [409, 409]
    assert change.json()["error"]["remedy"] == "Start `llamasup serve --config FILE`."


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"text": 1}', b'{"version": "x"}', b"\xff", b"[" * 100_000],
    ids=range(8),
)
@pytest.mark.parametrize(
    ("method", "target"), [("PUT", "/config"), ("POST", "/config/check"), ("POST", "/plan")]
)
def test_body_of_another_shape_is_refused(
    fake: FakeControlTarget, tmp_path: Path, method: str, target: str, body: bytes
) -> None:
    (answer,) = asked(fake, tmp_path, (method, target, body))
    assert (answer.status_code, answer.json()["error"]["cause"]) == (400, "usage")


@pytest.mark.check("X8", "413 for a config or a plan")
@pytest.mark.parametrize(
    ("method", "target"), [("PUT", "/config"), ("POST", "/config/check"), ("POST", "/plan")]
)
def test_body_that_is_too_large_is_refused(
    fake: FakeControlTarget, tmp_path: Path, method: str, target: str
) -> None:
    (answer,) = asked(fake, tmp_path, (method, target, {"text": "x" * MAX_BYTES, "version": "old"}))
    assert (answer.status_code, answer.json()["error"]["cause"]) == (413, "body_limit")


@pytest.mark.check("X13")
def test_error_quotes_no_text_of_a_config(fake: FakeControlTarget, tmp_path: Path) -> None:
    (answer,) = asked(fake, tmp_path, ("PUT", "/config", {"text": ["hf_secret"], "version": "hf_secret"}))
    assert answer.status_code == 400
    assert "hf_secret" not in answer.text
