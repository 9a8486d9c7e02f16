"""The section ``peers`` of a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import shown
from llamasup.core.http.address import host_of_url, is_loopback, is_private
from llamasup.core.settings.declaration import ConfigKey, Place, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import Endpoint, FilePath, Named, Section


class NodeUrl(Endpoint, frozen=True):
    """``_issues`` decides where http is allowed."""

    allowed: str = "the URL of another llamasup, such as https://desk.example.net:8080"
    pattern: str = r"https?://[^\s/?#@]+/?"


class PeerEntry(SettingGroup, frozen=True, kw_only=True):
    """Another llamasup, whose models are served here too (docs/peers.md)."""

    url: str | None = setting(
        NodeUrl(), "Where it listens. http only on this machine or a private address.", "required"
    )
    key_file: Path | None = setting(
        FilePath("the path of a file with a key", hidden=True),
        "A file that has only its API key for this node, with the rights inference,node.",
        "none; required for other machines",
    )
    ca_file: Path | None = setting(
        FilePath("the path of a PEM file"),
        "The CA that signed its certificate, or that certificate itself.",
        "the CAs of the system",
    )


def _issues(config: Config, _: bool) -> Iterator[tuple[Place, str]]:
    """Plain http, or no key, is allowed only where no other person can listen or answer."""
    urls: dict[str, str] = {}
    for name, entry in config.of(PEERS).items():
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


PEERS: Final[ConfigKey[Mapping[str, PeerEntry]]] = ConfigKey(
    "peers",
    Setting(
        Named(Section(PeerEntry)), "Other llamasup nodes by name. This node also serves their models.", "none"
    ),
    {},
    after="slots",
    issues=_issues,
    finds_models=(("peers",),),
)
