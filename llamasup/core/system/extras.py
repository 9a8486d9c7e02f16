"""The command that installs an extra of llamasup: optional packages that some functions need.

The command names the packages, and not ``llamasup[EXTRA]``: this also works where llamasup was installed from
a checkout. It depends on the program that made the environment of this Python.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Extra = Literal["batch", "embedded", "fleet", "gpu", "otel"]

PACKAGES: Mapping[Extra, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("jsonschema>=4.23",),
        "embedded": ("xllamacpp>=2026.10",),
        "fleet": ("cryptography>=44", "ray[serve]>=2.60,<2.61"),
        "gpu": ("nvidia-ml-py>=13.580",),
        "otel": ("opentelemetry-exporter-otlp-proto-http>=1.45",),
    }
)
"""The packages of each extra, as in ``pyproject.toml``."""


def install_command(extra: Extra, *, again: bool = False) -> str:
    """Return the shell command that installs the packages of ``extra`` into the environment of this Python.

    ``again``: replace packages that are installed and do not work.
    """
    return f"{_installer(again=again)} {shlex.join(PACKAGES[extra])}"


def _installer(*, again: bool) -> str:
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx inject{' --force' if again else ''} {shlex.quote(prefix.name)}"
    python = shlex.quote(sys.executable)
    if (prefix / "uv-receipt.toml").exists() or importlib.util.find_spec("pip") is None:
        return f"uv pip install{' --reinstall' if again else ''} --python {python}"
    return f"{python} -m pip install{' --force-reinstall' if again else ''}"
