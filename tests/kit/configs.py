"""Reads configs with the keys of all features, as commands do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamasup.core.config import reading
from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import Issue
from llamasup.core.config.reading import Reading
from llamasup.features import config_keys


def load(path: Path, environ: Mapping[str, str], **options: Any) -> Config:
    return reading.load(path, environ, config_keys(), **options)


def read(path: Path, environ: Mapping[str, str], **options: Any) -> tuple[Reading, tuple[Issue, ...]]:
    return reading.read(path, environ, config_keys(), **options)


def read_text(
    content: bytes, file: str, folder: Path, environ: Mapping[str, str], **options: Any
) -> tuple[Reading, tuple[Issue, ...]]:
    return reading.read_text(content, file, folder, environ, config_keys(), **options)
