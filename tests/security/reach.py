"""What each right reaches: the threat model of docs/security.md, as data.

``tests/e2e/test_reach.py`` tries every row with every right at a running llamasup, and
``scripts/docs.py`` writes the rows into the page.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = ["REACH", "RIGHTS", "Reach"]

RIGHTS: Final = ("none", "inference", "control", "console", "node", "local user")
"""``console``: the page of a session, with its secret and its key for models. ``local user``: the private
socket, which only the user of llamasup may open, or a request without a key.
"""
_ALL: Final = frozenset(RIGHTS)
_CONTROL: Final = frozenset({"control", "console", "local user"})
_MODELS: Final = frozenset({"inference", "console", "node"})


class Reach(NamedTuple):
    """``what`` is for the page; the request shows it. ``rights`` reach it, and no other does."""

    what: str
    method: str
    path: str
    rights: frozenset[str]
    body: Any = None
    as_node: bool = False


_CHAT: Final = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
REACH: Final = (
    Reach("whether it is ready: `/livez`, `/readyz`, `/health`", "GET", "/livez", _ALL),
    Reach("the page of the console, which has no secrets of users", "GET", "/llamasup/", _ALL),
    Reach("the names and states of the models: `/v1/models`", "GET", "/v1/models", _MODELS | {"control"}),
    Reach("metrics: `/metrics`", "GET", "/metrics", _MODELS | _CONTROL),
    Reach("the models: chat, embeddings and all other work", "POST", "/v1/chat/completions", _MODELS, _CHAT),
    Reach("properties of a model, without folders: `/props`", "GET", "/props?model=tiny", _MODELS),
    Reach("its own files and batches: `/v1/files`", "GET", "/v1/files", _MODELS | {"local user"}),
    Reach("the models as another node sees them", "GET", "/v1/models", frozenset({"node"}), as_node=True),
    Reach("requests of all clients: `requests`", "GET", "/llamasup/v1/requests", _CONTROL),
    Reach("the log of llamasup: `logs`", "GET", "/llamasup/v1/logs", _CONTROL),
    Reach("logs of llama-server: `models/{id}/logs`", "GET", "/llamasup/v1/models/tiny/logs", _CONTROL),
    Reach("the config: `config`", "GET", "/llamasup/v1/config", _CONTROL),
    Reach("a change of the config", "PUT", "/llamasup/v1/config", _CONTROL, {"text": "", "version": "old"}),
    Reach("loads and unloads: `models/{id}/load`", "POST", "/llamasup/v1/models/tiny/load", _CONTROL, {}),
    Reach(
        "the same with llama.cpp's router API: `/models/load`",
        "POST",
        "/models/load",
        _CONTROL,
        {"model": "tiny"},
    ),
    Reach("a session of the console with its own rights", "POST", "/llamasup/v1/console/token", _CONTROL, {}),
    Reach(
        "another program: `upgrade`",
        "POST",
        "/llamasup/v1/upgrade",
        frozenset({"local user"}),
        {"dry_run": 1},
    ),
    Reach("tools, other hosts, MCP: `/tools`, `/cors-proxy`", "POST", "/tools", frozenset(), {}),
    Reach(
        "saved slots and adapters of all clients", "POST", "/slots/0?action=save&model=tiny", frozenset(), {}
    ),
)
