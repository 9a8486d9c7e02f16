"""Finds the config file that applies, and replaces ``${NAME}`` in it by environment variables.

``${NAME:-text}`` gives the text if the variable is unset or empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from llamasup.core.system.native import native
from llamasup.errors import ConfigInvalid

VARIABLE = "LLAMASUP_CONFIG"


def own_config(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's config: ``$XDG_CONFIG_HOME/llamasup/config.yaml``."""
    given = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(given) if Path(given).is_absolute() else Path(environ.get("HOME") or Path.home()) / ".config"
    return base / "llamasup" / "config.yaml"


def system_config() -> Path | None:
    """Return the path of the machine's config. None: a system where every user could write one (Windows)."""
    folder = native.config_folder
    return None if folder is None else Path(folder) / "llamasup" / "config.yaml"


def find_config(given: Path | None, environ: Mapping[str, str]) -> Path:
    """Return ``given`` (``--config``), else ``$LLAMASUP_CONFIG``, else the user's or the machine's config.

    A named file is returned even if it is missing: no other file may replace it. Raises ConfigInvalid if no
    file is named and none exists.
    """
    named = given or (Path(environ[VARIABLE]) if environ.get(VARIABLE) else None)
    if named is not None:
        try:
            return named.expanduser().absolute()
        except RuntimeError:  # ~name
            raise ConfigInvalid(
                f"The path of the config {str(named)!r} names an unknown user.",
                remedy="Correct the name after ~, or write the path without ~.",
            ) from None
    of_machine = system_config()
    paths = (own_config(environ), *([] if of_machine is None else [of_machine]))
    for path in paths:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # the file may exist: reading it reports the error
        return path
    raise ConfigInvalid(
        f"No config was found: {_none_of(paths)}, and ${VARIABLE} is not set.",
        remedy="Write one with `llamasup config init`, name one with --config, or serve a folder without a "
        "config: `llamasup serve --models-dir FOLDER`.",
    )


def _none_of(paths: Sequence[Path]) -> str:
    if len(paths) == 1:
        return f"{paths[0]} does not exist"
    return f"neither {' nor '.join(map(str, paths))} exists"


_REFERENCE = re.compile(r"\$(\$(?=\{))|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|\$\{")


class InvalidReference(Exception):
    """A reference that cannot be replaced; the text gives the reason and the remedy."""


def has_reference(text: str) -> bool:
    """Whether ``expanded`` reads the environment, or fails."""
    return any(found[1] is None for found in _REFERENCE.finditer(text))


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace the variables in ``text``; their values are not expanded again. ``$${`` is a literal ``${``.

    Raises InvalidReference.
    """

    def value(found: re.Match[str]) -> str:
        escape, name, default = found.groups()
        if escape:
            return "$"
        if name is None:
            raise InvalidReference("invalid variable after '${'; write it as ${HOME}, or a literal ${ as $${")
        known = environ.get(name)
        if default is not None:
            return known or default
        if known is None:
            raise InvalidReference(
                f"the environment variable {name} is not set; set it, or write a default: ${{{name}:-value}}"
            )
        return known

    return _REFERENCE.sub(value, text)
