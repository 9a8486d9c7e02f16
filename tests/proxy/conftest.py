from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamasup.proxy import ProxyConfig
from tests.proxy.rig import Rig

MakeRig = Callable[..., Rig]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_rig(loop_name: str, tmp_path: Path) -> Iterator[MakeRig]:
    """Rigs with a configuration of the test's own, on both loops."""
    made: list[Rig] = []

    def make(config: ProxyConfig | None = None, **options: Any) -> Rig:
        rig = Rig(tmp_path, loop_name, config or ProxyConfig(), **options)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """A proxy as it is by default."""
    return make_rig()
