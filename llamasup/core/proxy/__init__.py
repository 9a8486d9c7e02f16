"""The data plane: accepts the requests of clients and forwards them to llama-server."""

from __future__ import annotations

from llamasup.core.proxy.listeners.bind import bind, bind_unix
from llamasup.core.proxy.proxy import Proxy
from llamasup.core.proxy.settings import Limits, ProxyConfig

__all__ = ["Limits", "Proxy", "ProxyConfig", "bind", "bind_unix"]
