"""Finds errors between keys whose values are valid alone. Unreadable values are not reported again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import MAX_PATTERNS, Issue, Place, issue_at, place_text, shown
from llamasup.core.http.address import (
    TcpAddress,
    UnixAddress,
    host_of_url,
    is_loopback,
    is_private,
    listen_text,
)
from llamasup.core.models.name_bindings import can_share
from llamasup.core.models.names import NameIndex, folded, pattern
from llamasup.core.models.rules import wrong_rules
from llamasup.core.models.virtual import candidates_of, spellings_of, virtual_mistakes
from llamasup.core.settings.address_kinds import worker_identity
from llamasup.core.settings.model import ModelEntry, ModelSettings
from llamasup.core.settings.names import is_pattern
from llamasup.core.settings.parameters import names_of
from llamasup.core.settings.sections import VirtualEntry
from llamasup.core.system.text import is_path

_SOURCES = ("path", "repo", "url")


def inconsistencies(config: Config, *, models_are_known: bool) -> list[Issue]:
    """List the errors between keys.

    ``models_are_known``: all entries of ``models`` are valid and no other models exist, so an unknown name is
    an error.
    """
    lines = config.lines
    models_are_known = models_are_known and not _can_find_more(lines)
    found = [
        *_listen_issues(config),
        *_model_issues(config, lines),
        *_group_issues(config, models_are_known=models_are_known),
        *_virtual_issues(config, models_are_known=models_are_known),
        *_worker_issues(config),
        *_download_issues(config),
        *_peer_issues(config),
        *_fleet_issues(config),
        *_runtime_issues(config),
    ]
    if models_are_known:
        found += _unserved_issues(config, lines)
    return [issue_at(place, what, lines) for place, what in found]


_Found = Iterator[tuple[Place, str]]


def _can_find_more(lines: Mapping[Place, int]) -> bool:
    """Whether llamasup may serve models that the config does not name."""
    keys: tuple[Place, ...] = (("models_dir",), ("caches",), ("peers",))
    return any(key in lines for key in (*keys, ("downloads", "on_demand"), ("fleet", "directory")))


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
    if config.ollama.listen in config.listen:
        yield ("ollama", "listen"), "is also in listen; give Ollama's API an address of its own"
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


def _unserved_issues(config: Config, lines: Mapping[Place, int]) -> _Found:
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
    if default is None or folded(default) in spellings_of(config.virtual_models):
        return
    if len(NameIndex(_owners(config)).resolve(default)) != 1:
        yield ("default_model",), _unknown_model(default)


def _owners(config: Config) -> Mapping[str, str]:
    """The model of each name and alias in the config."""
    named = [name for name in config.models if not is_pattern(name)]
    return {
        **{alias: name for name in named for alias in config.models[name].aliases},
        **{name: name for name in named},
    }


def _unknown_model(name: str) -> str:
    return f"unknown model {shown(name)}; add it to models, or correct the name"


# --- groups ------------------------------------------------------------------------------------------


def _group_issues(config: Config, *, models_are_known: bool) -> _Found:
    """A model in two groups would evict members of both; that is one group."""
    named = [name for name in config.models if not is_pattern(name)]
    owner = _owners(config)
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
                    yield key, _unknown_model(member)
            for name in names:
                before = first.setdefault(name, key)
                if before != key:
                    what = f"model {shown(name)} is already in {place_text(before)}"
                    yield key, f"{what}; keep a model in one group, once"


# --- virtual models ----------------------------------------------------------------------------------


def _virtual_issues(config: Config, *, models_are_known: bool) -> _Found:
    entries = config.virtual_models
    owners = _owners(config)
    index, spellings = NameIndex(owners), spellings_of(entries)
    taken = set(map(folded, owners))
    for name, entry in entries.items():
        key: Place = ("virtual_models", name)
        if folded(name) in taken:  # a client may write it in any spelling
            yield key, "is the name or an alias of a model too; choose another name"
        if entry.model is not None and entry.any:
            yield key, "model and any exclude each other; keep one of them"
        elif not (entry.model or entry.any or {(*key, "model"), (*key, "any", 0)} & config.lines.keys()):
            yield key, "model is missing; add the model that it stands for, or a list of models as any"
        if models_are_known:
            for place, member in _members(entry, key):
                if folded(member) not in spellings and len(index.resolve(member)) != 1:
                    yield place, _unknown_model(member)
        yield from _parameter_issues(entry, key)
    default = spellings.get(folded(config.default_model or ""))
    if default is not None:
        yield ("default_model",), f"{shown(default)} is a virtual model; name a model"
    mistakes = [(("virtual_models", name), what) for name, what in virtual_mistakes(entries)]
    yield from mistakes or _unused_issues(entries, spellings, index)


def _members(entry: VirtualEntry, key: Place) -> Iterator[tuple[Place, str]]:
    if entry.model is not None:
        yield (*key, "model"), entry.model
    for number, member in enumerate(entry.any):
        yield (*key, "any", number), member


def _unused_issues(
    entries: Mapping[str, VirtualEntry], spellings: Mapping[str, str], index: NameIndex
) -> _Found:
    """Find members of ``any`` that no request takes: of two with the same model, it takes the first."""
    candidates = candidates_of(entries)
    for name, entry in entries.items():
        seen: set[str] = set()
        for place, member in _members(entry, ("virtual_models", name)):
            virtual = spellings.get(folded(member))
            names = [member] if virtual is None else [one.model for one in candidates[virtual]]
            models = {next(iter(index.resolve(model)), folded(model)) for model in names}
            if models and models <= seen:
                what = f"no request takes {shown(member)}, because a name before it stands for the same model"
                yield place, f"{what}; remove one of them"
            seen |= models


def _parameter_issues(entry: VirtualEntry, key: Place) -> _Found:
    """Find parameters that occur twice. Some have a different name in each API."""
    first: dict[str, tuple[str, str]] = {}
    for section, parameters in (("set", entry.set), ("default", entry.default)):
        for parameter in parameters:
            before, same = first.setdefault(names_of(parameter)[0], (section, parameter))
            if same != parameter:
                what = f"is the same parameter as {before}.{same}; remove one of them"
                yield (*key, section, parameter), what
            elif before != section:
                yield (*key, section, parameter), "has no effect, because set has it too; remove one of them"
    removed: dict[str, str] = {}
    for number, parameter in enumerate(entry.remove):
        place, own = (*key, "remove", number), names_of(parameter)[0]
        if own in first:
            what = f"{shown(parameter)} is in {first[own][0]} too"
            yield place, f"{what}; use set to replace what the client sends"
        elif own in removed:
            same = "occurs twice" if removed[own] == parameter else f"is the same as {shown(removed[own])}"
            yield place, f"{shown(parameter)} {same}; remove it"
        removed.setdefault(own, parameter)


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


def _peer_issues(config: Config) -> _Found:
    """Plain http, or no key, is allowed only where no other person can listen or answer."""
    urls: dict[str, str] = {}
    for name, entry in config.peers.items():
        key: Place = ("peers", name)
        if entry.url is None:
            if (*key, "url") not in config.lines:  # else its value is invalid
                yield (
                    key,
                    "url is missing; add the address of this node, such as https://desk.example.net:8080",
                )
            continue
        other = urls.setdefault(entry.url, name)
        if other != name:
            yield (*key, "url"), f"is also the url of {shown(other)}; remove one of them"
        host = host_of_url(entry.url)
        if host is None:
            yield (*key, "url"), "is not a valid URL; write it like https://desk.example.net:8080"
            continue
        is_encrypted = entry.url.lower().startswith("https:")
        if not is_encrypted and not (is_loopback(host) or is_private(host)):
            what = f"http to {shown(host)} is refused: other people could read and change the requests"
            yield (*key, "url"), f"{what}; use https, or a private address such as 192.168.1.20"
        elif entry.key_file is None and not is_loopback(host):
            yield key, "key_file is missing; another machine needs an API key (`llamasup key new` there)"
        if entry.ca_file is not None and not is_encrypted:
            yield (*key, "ca_file"), "has no effect without https; change url, or remove it"


def _fleet_issues(config: Config) -> _Found:
    """Serve places one process for each replica, and a front has no models of its own."""
    fleet = config.fleet
    if fleet is None:
        return
    replicas: list[tuple[Place, int, int]] = [
        (("fleet", "min_replicas"), fleet.min_replicas, fleet.max_replicas)
    ]
    for name, own in fleet.models.items():
        if own.min_replicas is not None or own.max_replicas is not None:
            least = fleet.min_replicas if own.min_replicas is None else own.min_replicas
            most = fleet.max_replicas if own.max_replicas is None else own.max_replicas
            replicas.append((("fleet", "models", name), least, most))
    for place, least, most in replicas:
        if least > most:
            what = f"min_replicas is {least}, and max_replicas {most}"
            yield place, f"{what}; the least number must not be above the largest"
    if fleet.listen is not None and int(fleet.listen.rpartition(":")[2]) not in range(1, 65536):
        yield ("fleet", "listen"), f"invalid port in {shown(fleet.listen)}; a port is from 1 to 65535"
    for place, entry in (
        (("defaults",), config.defaults),
        *((("models", name), entry) for name, entry in config.models.items()),
    ):
        if (entry.replicas or 1) > 1:
            yield (*place, "replicas"), "has no effect in a fleet; use max_replicas of fleet"
        if entry.rpc:
            yield (*place, "rpc"), "is not possible in a fleet: each replica would need workers of its own"
    if fleet.directory is None:
        return
    if host_of_url("http://" + fleet.directory.partition("://")[2].partition("/")[0]) is None:
        yield ("fleet", "directory"), "is not a valid URL; write it like http://head:8000"
    why = "has no effect with fleet.directory, because a front serves the models of the fleet"
    for place, is_set in (
        (("peers",), bool(config.peers)),
        (("downloads", "on_demand"), config.downloads.on_demand),
        (("default_model",), config.default_model is not None),
    ):
        if is_set:
            yield place, f"{why}; remove it"


def _runtime_issues(config: Config) -> _Found:
    if config.runtime.watch and not is_path(config.runtime.path or ""):
        yield (
            ("runtime", "watch"),
            "only the path of a llama-server can be watched; write it into path, or remove watch",
        )


def _download_issues(config: Config) -> _Found:
    if config.downloads.private_addresses:
        return
    what = "http is refused; use https, or set downloads.private_addresses to true"
    for name, entry in config.models.items():
        if entry.url is not None and entry.url.startswith("http:"):
            yield ("models", name, "url"), what
    if config.downloads.endpoint is not None and config.downloads.endpoint.startswith("http:"):
        yield ("downloads", "endpoint"), what
