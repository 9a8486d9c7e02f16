from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.exchange import Exchange
from llamasup.core.proxy.exchange_states import TRANSITIONS
from llamasup.core.proxy.upstream import pool as upstream_pool
from llamasup.core.queueing import request_queue
from tests.core.proxy.rig import Clock, Rig

MakeRig = Callable[..., Rig]
SHORT_S = 0.01


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The proxy's clock, which a test can set forward."""
    clock = Clock()
    for name, module in list(sys.modules.items()):
        if name.startswith("llamasup.core.proxy.") and vars(module).get("monotonic") is monotonic:
            monkeypatch.setattr(module, "monotonic", clock)
    return clock


@pytest.fixture
def no_cause(monkeypatch: pytest.MonkeyPatch) -> float:
    """Proxies wait only this time for the exit of a server that closed a connection, for it does not exit."""
    monkeypatch.setattr(request_queue, "GRACE_S", SHORT_S)
    return SHORT_S


def set_field(exchange: Exchange, name: str, value: Any) -> None:
    """Set a field. Only changes of the state that the table has are allowed."""
    if name == "state" and value is not exchange.state:
        assert value in TRANSITIONS.get(exchange.state, ()), (exchange.state, value)
    Struct.__setattr__(exchange, name, value)


@pytest.fixture
def make_rig(
    request: pytest.FixtureRequest, loop_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeRig]:
    """Makes rigs with a configuration of the test, on both loops."""
    # A test on a busy machine may need longer than 4 s until its next request.
    monkeypatch.setattr(upstream_pool, "IDLE_S", 3600.0)
    monkeypatch.setattr(Exchange, "__setattr__", set_field)
    made: list[Rig] = []

    def make(config: ProxyConfig | None = None, **options: Any) -> Rig:
        config = config or ProxyConfig()
        if "no_cause" in request.fixturenames:
            config = replace(config, limits=replace(config.limits, cause_wait_s=SHORT_S))
        rig = Rig(tmp_path, loop_name, config, **options)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """A proxy with the default configuration."""
    return make_rig()
