"""The section ``batches`` of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llamasup.core.settings.declaration import ConfigKey, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import Boolean, FilePath, Integer, Section, SizeText, Text
from llamasup.core.settings.units import Size

_HOURS: Final = r"(?:[01]\d|2[0-3]):[0-5]\d-(?:[01]\d|2[0-3]):[0-5]\d"


class Batches(SettingGroup, frozen=True, kw_only=True):
    """The API for batches: ``/v1/files`` and ``/v1/batches`` of OpenAI's client."""

    enabled: bool = setting(Boolean(), "Serve /v1/files and /v1/batches.", unset=False)
    folder: Path | None = setting(
        FilePath("a folder"), "The folder of the files: a new or an empty one.", "one in the state folder"
    )
    max_file: Size = setting(
        SizeText(percent=False), "The largest file of a client.", unset=Size(bytes=512 << 20)
    )
    disk: Size = setting(
        SizeText(percent=False),
        "The disk space for all files. When it is full, uploads are refused.",
        unset=Size(bytes=10 << 30),
    )
    max_files: int = setting(Integer(1, 1_000_000), "How many files a client may have.", unset=1_000)
    max_lines: int = setting(Integer(1, 10_000_000), "How many lines a batch may have.", unset=100_000)
    max_batches: int = setting(Integer(1, 10_000), "How many unfinished batches a client may have.", unset=20)
    keep_days: int = setting(Integer(1, 3_650), "How many days to keep files and finished batches.", unset=30)
    only_between: str | None = setting(
        Text("hours such as 22:00-07:00", _HOURS),
        "The hours of the local time in which batches run.",
        "all day",
    )


BATCHES: Final = ConfigKey(
    "batches", Setting(Section(Batches), "The API for batches."), Batches(), after="slots"
)
