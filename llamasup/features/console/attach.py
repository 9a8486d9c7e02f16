"""Makes the web console a part of the control application."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamasup.core.control.interface import ControlTarget
from llamasup.core.http.address import Address
from llamasup.core.proxy.proxy import Proxy
from llamasup.features.console.routes import Console, page_address


def pages(
    proxy: Proxy, address: Address, hosts: Sequence[str], target: ControlTarget, wake: Callable[[], None]
) -> Console:
    return Console(
        proxy.console,
        proxy.keys,
        wake,
        page_address(address, hosts),
        describe=lambda: {"config": target.config is not None},
    )
