"""Makes the config of one node: the fleet's config, with one model.

The result is an ordinary config for ``llamasup serve``. Keys about other models, about addresses and about
the fleet itself are left out, so that their change replaces no node. Values keep their text and their quotes.
A decision, listed as an effect because the package of the config reads files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import yaml
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.config.config_keys import keys_of
from llamasup.core.config.nodes import Entry, Items, Node, Scalar, Table
from llamasup.core.models.names import pattern
from llamasup.core.settings.declaration import settings_of
from llamasup.core.settings.kinds import FilePath, Many, Section
from llamasup.core.settings.model import ModelEntry
from llamasup.core.settings.names import is_pattern
from llamasup.core.settings.units import duration_text
from llamasup.features import config_keys

# The files that a node writes next to its config.
KEYS: Final = "keys"
CERTIFICATE: Final = "certificate.pem"
PRIVATE_KEY: Final = "key.pem"

_KEPT: Final = ("runtime", "memory", "defaults", "downloads", "slots")
_REPLACED: Final = ("path", "repo", "url", "aliases", "preload", "ttl")


def node_config(
    written: Table,
    *,
    folder: str,
    model: str,
    source: str,
    aliases: tuple[str, ...],
    sleeps_after_s: float | None = None,
) -> str:
    """Return the config of a node, in YAML. ``written`` is the fleet's config, and ``folder`` its location,
    for relative paths. ``source``: the model's file, ``org/repo:quant`` or URL.

    The model is loaded at the start and stays loaded, because Serve decides how many replicas there are; with
    ``sleeps_after_s``, until it has been idle for this time.
    """
    known = keys_of(config_keys())
    kept = {key: node for key, node in _entries(written) if key in _KEPT}
    models = dict(_entries(_at(written, "models")))
    rules = {
        name: _absolute(node, ModelEntry, folder)
        for name, node in models.items()
        if is_pattern(name) and any(map(pattern(name).fullmatch, (model, *aliases)))
    }
    own = dict(_entries(_absolute(models.get(model), ModelEntry, folder)))
    entry = {
        **{key: node for key, node in own.items() if key not in _REPLACED},
        _key_of(source): _text(source),
        "aliases": Items(0, [_text(alias) for alias in aliases]),
        "preload": _plain("true"),
        "ttl": _plain("never" if sleeps_after_s is None else duration_text(sleeps_after_s)),
    }
    if "defaults" in kept:
        kept["defaults"] = _absolute(kept["defaults"], ModelEntry, folder)
    if "downloads" in kept:
        section = known["downloads"][1].kind
        assert isinstance(section, Section)
        downloads = dict(_entries(_absolute(kept["downloads"], section.keys, folder)))
        downloads.pop("on_demand", None)
        kept["downloads"] = _mapping(downloads)
    if "runtime" in kept:
        kept["runtime"] = _runtime(kept["runtime"], folder)
    http = {"tls_cert": _text(CERTIFICATE), "tls_key": _text(PRIVATE_KEY), "ui": _plain("false")}
    media = dict(_entries(_at(written, "http"))).get("remote_media")  # the node checks bodies again
    return _yaml(
        _mapping(
            {
                **kept,
                "models": _mapping({model: _mapping(entry), **rules}),
                "auth": _mapping({"api_key_file": _text(KEYS)}),
                "http": _mapping(http if media is None else {**http, "remote_media": media}),
                # The front counts each request.
                **({"usage": _mapping({"enabled": _plain("false")})} if "usage" in known else {}),
            }
        )
    )


def _key_of(source: str) -> str:
    if source.startswith("/") or source == "demo":
        return "path"
    return "url" if "://" in source else "repo"


# --- relative paths ----------------------------------------------------------------------------------


def _absolute(node: Node | None, group: type[Struct], folder: str) -> Table:
    """Make the paths of the mapping ``node`` absolute."""
    known = settings_of(group)
    return _mapping(
        {
            key: _absolute_value(value, known[key][1].kind, folder) if key in known else value
            for key, value in _entries(node)
        }
    )


def _absolute_value(node: Node, kind: Any, folder: str) -> Node:
    if isinstance(kind, Many):
        if isinstance(node, Items):
            return Items(0, [_absolute_value(item, kind.kind, folder) for item in node.items])
        kind = kind.kind
    if not (isinstance(kind, FilePath) and isinstance(node, Scalar)):
        return node
    if node.is_null or node.text in kind.literal:
        return node
    return replace(node, text=_path(node.text, folder))


def _runtime(node: Node, folder: str) -> Node:
    """A name stays, and a path becomes absolute."""
    if isinstance(node, Table):
        return _mapping(
            {key: _runtime(value, folder) if key == "path" else value for key, value in _entries(node)}
        )
    if isinstance(node, Scalar) and "/" in node.text:
        return replace(node, text=_path(node.text, folder))
    return node


def _path(value: str, folder: str) -> str:
    """Make a path absolute. ``~`` and variables stay: they are those of the node."""
    return value if value.startswith(("/", "~", "${")) else str(PurePosixPath(folder, value))


# --- the tree of a config ----------------------------------------------------------------------------


def _entries(node: Node | None) -> Iterator[tuple[str, Node]]:
    """Yield the entries of a mapping; none if it is null or missing."""
    if isinstance(node, Table):
        yield from ((entry.key, entry.node) for entry in node.entries)


def _at(node: Table, key: str) -> Node | None:
    return dict(_entries(node)).get(key)


def _mapping(entries: Mapping[str, Node]) -> Table:
    return Table(0, [Entry(key, 0, node) for key, node in entries.items()])


def _text(text: str) -> Scalar:
    return Scalar(0, text, plain=False)


def _plain(text: str) -> Scalar:
    return Scalar(0, text, plain=True)


def _yaml(root: Table) -> str:
    events = (
        yaml.StreamStartEvent(),
        yaml.DocumentStartEvent(),
        *_events(root),
        yaml.DocumentEndEvent(),
        yaml.StreamEndEvent(),
    )
    text: str = yaml.emit(events, width=1 << 20, allow_unicode=True)
    return text


def _events(node: Node) -> Iterator[yaml.Event]:
    if isinstance(node, Scalar):
        implicit = (node.plain, not node.plain)
        yield yaml.ScalarEvent(None, None, implicit, node.text, style=None if node.plain else '"')
    elif isinstance(node, Items):
        yield yaml.SequenceStartEvent(None, None, implicit=True)
        for item in node.items:
            yield from _events(item)
        yield yaml.SequenceEndEvent()
    else:
        yield yaml.MappingStartEvent(None, None, implicit=True)
        for entry in node.entries:
            yield from _events(_text(entry.key))
            yield from _events(entry.node)
        yield yaml.MappingEndEvent()
