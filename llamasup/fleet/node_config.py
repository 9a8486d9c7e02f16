"""The config of one node (pure): the fleet's config, with one model.

The result is an ordinary config for ``llamasup serve``, in YAML's subset JSON. Keys about other models, about
addresses and about the fleet itself are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec
from msgspec import Struct

from llamasup.settings.declaration import settings_of
from llamasup.settings.kinds import FilePath, Many
from llamasup.settings.model import ModelEntry
from llamasup.settings.sections import Downloads

__all__ = ["NodeFiles", "node_config"]

_KEPT: Final = ("runtime", "memory", "defaults", "downloads", "slots")
_MODEL_FILES: Final = ("path", "repo", "url")


class NodeFiles(Struct, frozen=True):
    """The files that a node writes for its llamasup."""

    keys: str
    certificate: str
    private_key: str


def node_config(
    written: Mapping[str, Any],
    *,
    folder: str,
    model: str,
    source: str,
    aliases: tuple[str, ...],
    files: NodeFiles,
) -> bytes:
    """``written``: the fleet's config as a mapping; ``folder``: where it is, for relative paths. ``source``:
    the model's file, ``org/repo:quant`` or URL.

    The model is loaded at the start and stays loaded: Serve decides how many replicas there are.
    """
    kept = {key: written[key] for key in _KEPT if key in written}
    entries = written.get("models") or {}
    rules = {
        name: _absolute(entry, ModelEntry, folder) for name, entry in entries.items() if set(name) & set("*?")
    }
    own = _absolute(entries.get(model) or {}, ModelEntry, folder)
    own = {key: value for key, value in own.items() if key not in _MODEL_FILES}
    entry = {**own, _key_of(source): source, "aliases": list(aliases), "preload": True, "ttl": "never"}
    for key, group in (("defaults", ModelEntry), ("downloads", Downloads)):
        if key in kept:
            kept[key] = _absolute(kept[key] or {}, group, folder)
    if isinstance(runtime := kept.get("runtime"), str):
        kept["runtime"] = _path(runtime, folder) if "/" in runtime else runtime
    config = {
        **kept,
        "models": {model: entry, **rules},
        "auth": {"api_key_file": files.keys},
        "http": {"tls_cert": files.certificate, "tls_key": files.private_key, "ui": False},
        "usage": {"enabled": False},  # the front counts each request
    }
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def _key_of(source: str) -> str:
    if source.startswith("/") or source == "demo":
        return "path"
    return "url" if "://" in source else "repo"


def _absolute(entry: Mapping[str, Any] | None, group: type[Struct], folder: str) -> dict[str, Any]:
    """``entry`` with absolute paths."""
    known = settings_of(group)
    return {
        key: _absolute_value(value, known[key][1].kind, folder) if key in known else value
        for key, value in (entry or {}).items()
    }


def _absolute_value(value: Any, kind: Any, folder: str) -> Any:
    if isinstance(value, list) and isinstance(kind, Many):
        return [_absolute_value(item, kind.kind, folder) for item in value]
    kind = kind.kind if isinstance(kind, Many) else kind
    if isinstance(kind, FilePath) and isinstance(value, str) and value not in kind.literal:
        return _path(value, folder)
    return value


def _path(value: str, folder: str) -> str:
    """``~`` and variables are those of the node."""
    return value if value.startswith(("/", "~", "${")) else str(PurePosixPath(folder, value))
