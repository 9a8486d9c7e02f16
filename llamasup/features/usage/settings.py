"""The section ``usage`` of a config."""

from __future__ import annotations

from typing import Final

from llamasup.core.settings.declaration import ConfigKey, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import Boolean, Integer, Section

_KEEP_DAYS: Final = 400  # a year, and the month in which it is compared with the year before


class Usage(SettingGroup, frozen=True, kw_only=True):
    """Sums of requests, tokens and slot seconds by model, key and day, in the state folder."""

    enabled: bool = setting(Boolean(), "Count the usage, and save it once a minute.", unset=True)
    keep_days: int = setting(Integer(1, 36_500), "How many days to keep, with today.", unset=_KEEP_DAYS)


USAGE: Final = ConfigKey(
    "usage", Setting(Section(Usage), "Sums of requests and tokens."), Usage(), after="slots"
)
