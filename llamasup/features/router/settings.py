"""The section ``router`` of a config."""

from __future__ import annotations

from typing import Final

from llamasup.core.settings.declaration import ConfigKey, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import Boolean, Section


class Router(SettingGroup, frozen=True, kw_only=True):
    """llama.cpp's router API (docs/router.md)."""

    inference_keys: bool = setting(
        Boolean(),
        "Let every client that may use a model load and unload it, not only keys with the right control.",
        unset=False,
        names="rights",
    )
    props: bool = setting(
        Boolean(), "Answer /props as a router even if there is a default model.", unset=False
    )


ROUTER: Final = ConfigKey(
    "router", Setting(Section(Router), "llama.cpp's router API."), Router(), after="http"
)
