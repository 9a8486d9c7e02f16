"""llamasup keeps llama.cpp's ``llama-server`` running."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamasup.api import AsyncServer, Server, Serving, serve
    from llamasup.config import Config
    from llamasup.core.errors import (
        ConfigInvalid,
        DoesNotFit,
        GaveUp,
        LlamasupError,
        ModelInvalid,
        ModelMissing,
        ModelUnknown,
        PortInUse,
        RuntimeMissing,
        ServerFailed,
        UsageInvalid,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncServer",
    "Config",
    "ConfigInvalid",
    "DoesNotFit",
    "GaveUp",
    "LlamasupError",
    "ModelInvalid",
    "ModelMissing",
    "ModelUnknown",
    "PortInUse",
    "RuntimeMissing",
    "Server",
    "ServerFailed",
    "Serving",
    "UsageInvalid",
    "__version__",
    "serve",
]

_HOMES = dict.fromkeys(("AsyncServer", "Server", "Serving", "serve"), "llamasup.api") | {
    "Config": "llamasup.config"
}


def __getattr__(name: str) -> Any:
    """Late: the command line imports this package, and what it needs itself comes in milliseconds."""
    if name not in __all__:
        raise AttributeError(f"module 'llamasup' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "llamasup.core.errors")), name)
