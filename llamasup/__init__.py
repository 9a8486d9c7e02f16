"""llamasup keeps llama.cpp's ``llama-server`` running.

    with llamasup.serve("model.gguf") as server:
        answer = server.client.post("/v1/chat/completions", json={…})

docs/python.md describes the Python API.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamasup._version import __version__
    from llamasup.api import AsyncEvents, AsyncServer, Events, ModelArguments, Server, Serving, serve
    from llamasup.core.config.config_keys import Config
    from llamasup.errors import (
        AccessDenied,
        BrokenRuntime,
        ConfigInvalid,
        Conflict,
        DiskFull,
        DoesNotFit,
        DownloadFailed,
        DownloadRefused,
        FolderUnusable,
        GaveUp,
        LlamasupError,
        ModelInvalid,
        ModelMissing,
        ModelUnknown,
        NotRunning,
        PortInUse,
        PortNotAllowed,
        RequestUnknown,
        RuntimeMissing,
        ServerFailed,
        Stopping,
        UnsafeBind,
        UsageInvalid,
    )


__all__ = [
    "AccessDenied",
    "AsyncEvents",
    "AsyncServer",
    "BrokenRuntime",
    "Config",
    "ConfigInvalid",
    "Conflict",
    "DiskFull",
    "DoesNotFit",
    "DownloadFailed",
    "DownloadRefused",
    "Events",
    "FolderUnusable",
    "GaveUp",
    "LlamasupError",
    "ModelArguments",
    "ModelInvalid",
    "ModelMissing",
    "ModelUnknown",
    "NotRunning",
    "PortInUse",
    "PortNotAllowed",
    "RequestUnknown",
    "RuntimeMissing",
    "Server",
    "ServerFailed",
    "Serving",
    "Stopping",
    "UnsafeBind",
    "UsageInvalid",
    "__version__",
    "serve",
]

_API = ("AsyncEvents", "AsyncServer", "Events", "ModelArguments", "Server", "Serving", "serve")
_HOMES = dict.fromkeys(_API, "llamasup.api") | {
    "Config": "llamasup.core.config.config_keys",
    "__version__": "llamasup._version",
}


def __getattr__(name: str) -> Any:
    """Imports names lazily: the command line imports this package, and must start in milliseconds."""
    if name not in __all__:
        raise AttributeError(f"module 'llamasup' has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_HOMES.get(name, "llamasup.errors")), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
