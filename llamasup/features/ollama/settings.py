"""The section ``ollama`` of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from llamasup.core.config.config_keys import Config
from llamasup.core.http.address import Address
from llamasup.core.settings.declaration import ConfigKey, Place, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import Listen, Section


class Ollama(SettingGroup, frozen=True, kw_only=True):
    """Ollama's API (docs/ollama.md)."""

    listen: Address | None = setting(
        Listen(), "The address for clients of Ollama, such as 127.0.0.1:11434.", "Ollama's API is not served"
    )


def _issues(config: Config, _: bool) -> Iterator[tuple[Place, str]]:
    if config.of(OLLAMA).listen in config.listen:
        yield ("ollama", "listen"), "is also in listen; give Ollama's API an address of its own"


OLLAMA: Final = ConfigKey(
    "ollama", Setting(Section(Ollama), "Ollama's API."), Ollama(), after="http", issues=_issues
)
