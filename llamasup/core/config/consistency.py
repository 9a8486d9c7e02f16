"""Finds errors between keys whose values are valid alone. Unreadable values are not reported again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import MAX_PATTERNS, Issue, issue_at, place_text, shown
from llamasup.core.http.address import TcpAddress, UnixAddress, listen_text
from llamasup.core.models.name_bindings import can_share
from llamasup.core.models.names import NameIndex, pattern
from llamasup.core.models.rules import wrong_rules
from llamasup.core.settings.declaration import ConfigKey, Place
from llamasup.core.settings.model import ModelEntry, ModelSettings, worker_identity
from llamasup.core.settings.names import is_pattern
from llamasup.core.system.text import is_path

_SOURCES = ("path", "repo", "url", "command")


def inconsistencies(
    config: Config, features: Sequence[ConfigKey[Any]], *, models_are_known: bool
) -> list[Issue]:
    """List the errors between keys. ``features``: the keys of features.

    ``models_are_known``: all entries of ``models`` are valid and no other models exist, so an unknown name is
    an error.
    """
    lines = config.lines
    finds_models = (("models_dir",), ("caches",), *(place for key in features for place in key.finds_models))
    models_are_known = models_are_known and not any(place in lines for place in finds_models)
    found = [
        *_listen_issues(config),
        *_model_issues(config, lines),
        *_group_issues(config, models_are_known=models_are_known),
        *_worker_issues(config),
        *_runtime_issues(config),
        *(issue for key in features if key.issues for issue in key.issues(config, models_are_known)),
    ]
    if models_are_known:
        has_wrong_default = any(place == ("default_model",) for place, _ in found)
        found += _unserved_issues(config, lines, checks_default=not has_wrong_default)
    return [issue_at(place, what, lines) for place, what in found]


_Found = Iterator[tuple[Place, str]]


def _listen_issues(config: Config) -> _Found:
    ports: dict[int, str] = {}
    seen: set[TcpAddress | UnixAddress] = set()
    for number, address in enumerate(config.listen):
        key: Place = ("listen", number)
        text = listen_text(address)
        if address in seen:
            yield key, f"duplicate address {shown(text)}; keep one of them"
        elif isinstance(address, TcpAddress):
            ports.setdefault(address.port, text)
            if len(ports) > 1:
                first = next(iter(ports))
                what = f"port {address.port} differs from port {first} of {ports[first]}"
                yield key, f"{what}; use one port for all addresses"
        seen.add(address)
    if not config.listen:
        yield ("listen",), "the list is empty; add an address, or remove the key for 127.0.0.1:8080"
    http = config.http
    if (http.tls_cert is None) != (http.tls_key is None):
        present, missing = ("tls_key", "tls_cert") if http.tls_cert is None else ("tls_cert", "tls_key")
        yield ("http", present), f"{missing} is missing; TLS needs both files"
    elif http.tls_cert is not None and any(isinstance(address, UnixAddress) for address in config.listen):
        what = (
            "TLS is not supported on a Unix socket; use HOST:PORT in listen, or remove tls_cert and tls_key"
        )
        yield ("http", "tls_cert"), what


# --- models ------------------------------------------------------------------------------------------


def _model_issues(config: Config, lines: Mapping[Place, int]) -> _Found:
    for rule, what in wrong_rules(config.rules):
        yield ("models", rule.name), what
    yield from _pin_issues(config.defaults, ("defaults",))
    for name, entry in config.models.items():
        key: Place = ("models", name)
        yield from _pin_issues(entry, key)
        sources = [source for source in _SOURCES if (*key, source) in lines]
        if len(sources) > 1:
            yield key, f"{' and '.join(sources)} exclude each other; keep one of them"
        seen = {name}
        for number, alias in enumerate(entry.aliases):
            if alias in seen:
                what = "is the model's own name" if alias == name else "occurs twice"
                yield (*key, "aliases", number), f"alias {shown(alias)} {what}; remove it"
            seen.add(alias)
    pinned = [name for name, entry in config.models.items() if entry.pin and not is_pattern(name)]
    if config.max_loaded is not None and len(pinned) > config.max_loaded:
        what = f"{config.max_loaded} is less than the {len(pinned)} pinned models ({', '.join(pinned[:5])})"
        yield ("max_loaded",), f"{what}; raise it, or pin fewer models"


def _pin_issues(keys: ModelSettings, key: Place) -> _Found:
    if keys.pin and keys.ttl_s is not None and keys.ttl_s != float("inf"):
        yield (*key, "ttl"), "a pinned model is never unloaded; remove ttl or pin"


def _unserved_issues(config: Config, lines: Mapping[Place, int], *, checks_default: bool) -> _Found:
    """Find names without a model, when the config has all models."""
    named = {name: entry for name, entry in config.models.items() if not is_pattern(name)}
    if not named:
        yield (), "no models to serve; add models_dir, models, caches or downloads.on_demand"
        return
    for name in named:
        key: Place = ("models", name)
        if not any((*key, source) in lines for source in _SOURCES):
            yield key, "no model file; add path, repo or url, or add models_dir or caches to find the model"
    default = config.default_model
    if checks_default and default is not None and len(NameIndex(owners_of(config)).resolve(default)) != 1:
        yield ("default_model",), unknown_model(default)


def owners_of(config: Config) -> Mapping[str, str]:
    """The model of each name and alias in the config."""
    named = [name for name in config.models if not is_pattern(name)]
    return {
        **{alias: name for name in named for alias in config.models[name].aliases},
        **{name: name for name in named},
    }


def unknown_model(name: str) -> str:
    return f"unknown model {shown(name)}; add it to models, or correct the name"


# --- groups ------------------------------------------------------------------------------------------


def _group_issues(config: Config, *, models_are_known: bool) -> _Found:
    """A model in two groups would evict members of both; that is one group."""
    named = [name for name in config.models if not is_pattern(name)]
    owner = owners_of(config)
    first: dict[str, Place] = {}
    patterns = 0
    for group, members in config.groups.items():
        for number, member in enumerate(members):
            key: Place = ("groups", group, number)
            if is_pattern(member):
                patterns += 1
                if patterns > MAX_PATTERNS:
                    yield key, f"more than {MAX_PATTERNS} names with * or ?; groups have at most that many"
                    return
                matches = pattern(member).fullmatch
                names = [name for name in named if matches(name)]
            else:
                names = [owner.get(member, member)]
                if models_are_known and names[0] not in owner:
                    yield key, unknown_model(member)
            for name in names:
                before = first.setdefault(name, key)
                if before != key:
                    what = f"model {shown(name)} is already in {place_text(before)}"
                    yield key, f"{what}; keep a model in one group, once"


def _worker_issues(config: Config) -> _Found:
    """An RPC worker serves one process at a time."""
    users: dict[object, str] = {}
    for name, entry in config.models.items():
        if is_pattern(name):
            continue
        for number, worker in enumerate(entry.over(config.defaults).rpc or ()):
            other = users.setdefault(worker_identity(worker), name)
            if other != name and not _take_turns(config, name, other):
                key: Place = ("models", name)
                what = (
                    f"the RPC worker {worker} is also that of {shown(other)}, and serves one model at a time"
                )
                remedy = "give each model its own workers, put both into a group, or set max_loaded to 1"
                yield (key if entry.rpc is None else (*key, "rpc", number)), f"{what}; {remedy}"


def _take_turns(config: Config, name: str, other: str) -> bool:
    """Whether at most one of two models is loaded, or one process serves both."""
    mine, theirs = config.models[name], config.models[other]
    is_one_file = mine.source is not None and mine.source == theirs.source
    if config.max_loaded == 1 or (is_one_file and can_share(mine.options, theirs.options)):
        return True
    return any(
        _is_member(members, name, mine) and _is_member(members, other, theirs)
        for members in config.groups.values()
    )


def _is_member(members: Sequence[str], name: str, entry: ModelEntry) -> bool:
    return any(
        pattern(member).fullmatch(name) if is_pattern(member) else member in (name, *entry.aliases)
        for member in members
    )


def _runtime_issues(config: Config) -> _Found:
    if config.runtime.watch and not is_path(config.runtime.path or ""):
        yield (
            ("runtime", "watch"),
            "only the path of a llama-server can be watched; write it into path, or remove watch",
        )
