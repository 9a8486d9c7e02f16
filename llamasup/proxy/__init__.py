"""The data plane: clients on one side, llama-server on the other, bytes straight through."""

from __future__ import annotations

from llamasup.proxy.bind import bind, bind_unix
from llamasup.proxy.proxy import Proxy
from llamasup.proxy.settings import Limits, ProxyConfig

__all__ = ["Limits", "Proxy", "ProxyConfig", "bind", "bind_unix"]
