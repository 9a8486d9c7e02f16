"""What is wrong between keys that are right each by itself.

What a key has that could not be read is not judged again: one mistake is one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llamasup.config.issues import MAX_PATTERNS, Issue, Place, mistake_at, place_text, shown
from llamasup.config.values import Config, ModelKeys
from llamasup.http.address import TcpAddress, UnixAddress
from llamasup.models.names import is_pattern, pattern
from llamasup.models.rules import wrong_rules

__all__ = ["inconsistencies"]

_SOURCES = ("path", "repo", "url")


def inconsistencies(config: Config, *, models_are_known: bool) -> list[Issue]:
    """``models_are_known``: none was refused and none comes from elsewhere, so that a name which is not there
    is a mistake.
    """
    lines = config.lines
    found = (
        *_of_listening(config),
        *_of_models(config, lines),
        *_of_groups(config, models_are_known=models_are_known and not _can_find_more(lines)),
        *_of_downloads(config),
    )
    if models_are_known and not _can_find_more(lines):
        found += tuple(_without_models(config, lines))
    return [mistake_at(place, what, lines) for place, what in found]


_Found = Iterator[tuple[Place, str]]


def _can_find_more(lines: Mapping[Place, int]) -> bool:
    """Whether there may be models besides those with a place of their own."""
    return any(key in lines for key in (("models_dir",), ("caches",), ("downloads", "on_demand")))


def _of_listening(config: Config) -> _Found:
    ports: dict[int, str] = {}
    seen: set[TcpAddress | UnixAddress] = set()
    for number, address in enumerate(config.listen):
        key: Place = ("listen", number)
        if address in seen:
            yield key, f"{shown(_written(address))} is there already; keep one of them"
        elif isinstance(address, TcpAddress):
            ports.setdefault(address.port, _written(address))
            if len(ports) > 1:
                first = next(iter(ports))
                yield key, f"port {address.port}, and {ports[first]} has {first}; all share one port"
        seen.add(address)
    if not config.listen:
        yield ("listen",), "no address; leave the key out for 127.0.0.1:8080"
    http = config.http
    if (http.tls_cert is None) != (http.tls_key is None):
        given, missing = ("tls_key", "tls_cert") if http.tls_cert is None else ("tls_cert", "tls_key")
        yield ("http", given), f"without {missing}; TLS takes both files"
    elif http.tls_cert is not None and any(isinstance(each, UnixAddress) for each in config.listen):
        yield (
            ("http", "tls_cert"),
            "TLS on a Unix socket protects nothing; listen on an address, or leave it out",
        )


def _written(address: TcpAddress | UnixAddress) -> str:
    return address.path if isinstance(address, UnixAddress) else address.authority


# --- models ------------------------------------------------------------------------------------------


def _of_models(config: Config, lines: Mapping[Place, int]) -> _Found:
    for rule, what in wrong_rules(config.rules):
        yield ("models", rule.name), what
    yield from _staying(config.defaults, ("defaults",))
    for name, entry in config.models.items():
        key: Place = ("models", name)
        yield from _staying(entry, key)
        given = [each for each in _SOURCES if (*key, each) in lines]
        if len(given) > 1:
            yield key, f"{' and '.join(given)}; a model is in one place, keep one of them"
        seen = {name}
        for number, alias in enumerate(entry.aliases):
            if alias in seen:
                what = "its own name" if alias == name else "given twice"
                yield (*key, "aliases", number), f"{shown(alias)} is {what}; leave it out"
            seen.add(alias)
    pinned = [name for name, entry in config.models.items() if entry.pin and not is_pattern(name)]
    if config.max_loaded is not None and len(pinned) > config.max_loaded:
        names = ", ".join(pinned[:5])
        yield ("max_loaded",), f"{config.max_loaded}, and {len(pinned)} models are pinned: {names}"


def _staying(keys: ModelKeys, key: Place) -> _Found:
    if keys.pin and keys.ttl_s is not None and keys.ttl_s != float("inf"):
        yield (*key, "ttl"), "of a model that is pinned, and never unloaded; keep ttl or pin"


def _without_models(config: Config, lines: Mapping[Place, int]) -> _Found:
    """What asks for models that are found, where none is looked for."""
    named = {name: entry for name, entry in config.models.items() if not is_pattern(name)}
    if not named:
        yield (), "there is nothing to serve; give models_dir, models, caches, or downloads.on_demand"
        return
    for name in named:
        key: Place = ("models", name)
        if not any((*key, each) in lines for each in _SOURCES):
            yield key, "it takes path, repo or url: there is no models_dir or cache where it could be found"
    known = {*named, *(alias for entry in named.values() for alias in entry.aliases)}
    if config.default_model is not None and config.default_model not in known:
        yield ("default_model",), f"{shown(config.default_model)} is no model of this config"


# --- groups ------------------------------------------------------------------------------------------


def _of_groups(config: Config, *, models_are_known: bool) -> _Found:
    """A model in two groups would have to make room in both: that is one group."""
    named = [name for name in config.models if not is_pattern(name)]
    owner = {alias: name for name in named for alias in config.models[name].aliases}
    owner |= {name: name for name in named}
    first: dict[str, Place] = {}
    patterns = 0
    for group, members in config.groups.items():
        for number, member in enumerate(members):
            key: Place = ("groups", group, number)
            if is_pattern(member):
                patterns += 1
                if patterns > MAX_PATTERNS:
                    yield key, f"more than {MAX_PATTERNS} names with * or ?"
                    return
                matches = pattern(member).fullmatch
                means = [name for name in named if matches(name)]
            else:
                means = [owner.get(member, member)]
                if models_are_known and means[0] not in owner:
                    yield key, f"{shown(member)} is no model of this config"
            for name in means:
                before = first.setdefault(name, key)
                if before != key:
                    yield key, f"{shown(name)} is in {place_text(before)} too; a model is in one group, once"


def _of_downloads(config: Config) -> _Found:
    if config.downloads.private_addresses:
        return
    allowed = "https alone is allowed, unless downloads.private_addresses is true"
    for name, entry in config.models.items():
        if entry.url is not None and entry.url.startswith("http:"):
            yield ("models", name, "url"), f"it is http; {allowed}"
    if config.downloads.endpoint is not None and config.downloads.endpoint.startswith("http:"):
        yield ("downloads", "endpoint"), f"it is http; {allowed}"
