"""The section ``downloads`` of a config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from llamasup.core.config.config_keys import Config
from llamasup.core.settings.declaration import ConfigKey, Place, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import Boolean, Endpoint, FilePath, Integer, Section


class Downloads(SettingGroup, frozen=True, kw_only=True):
    """Downloads of models."""

    on_demand: bool = setting(Boolean(), "Download each org/repo[:quant] that a request names.", unset=False)
    folder: Path | None = setting(
        FilePath("a folder"),
        "The folder for downloaded files.",
        "the first of models_dir, else the folder of llamasup pull",
    )
    endpoint: str | None = setting(
        Endpoint(), "The URL of the hub or of a mirror.", "$HF_ENDPOINT, else https://huggingface.co"
    )
    token_file: Path | None = setting(
        FilePath("the path of a file with a token", hidden=True),
        "The file with the token for the hub.",
        "$HF_TOKEN, if set",
    )
    private_addresses: bool = setting(
        Boolean(), "Allow downloads from private addresses, and over http.", names="host", unset=False
    )
    parallel: int = setting(Integer(1, 16), "The number of connections for one file.", unset=4)


def _issues(config: Config, _: bool) -> Iterator[tuple[Place, str]]:
    downloads = config.of(DOWNLOADS)
    if downloads.private_addresses:
        return
    what = "http is refused; use https, or set downloads.private_addresses to true"
    for name, entry in config.models.items():
        if entry.url is not None and entry.url.startswith("http:"):
            yield ("models", name, "url"), what
    if downloads.endpoint is not None and downloads.endpoint.startswith("http:"):
        yield ("downloads", "endpoint"), what


DOWNLOADS: Final = ConfigKey(
    "downloads",
    Setting(Section(Downloads), "Downloads of models."),
    Downloads(),
    after="http",
    issues=_issues,
    finds_models=(("downloads", "on_demand"),),
)
