"""Where a config file is searched for, and how ``${NAME}`` in it is replaced by environment variables.

``${NAME:-text}`` gives the text for a variable that is not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llamasup.errors import ConfigInvalid

__all__ = ["VARIABLE", "Unset", "expanded", "find_config", "own_config", "system_config"]


VARIABLE = "LLAMASUP_CONFIG"


def own_config(environ: Mapping[str, str]) -> Path:
    """This user's: ``$XDG_CONFIG_HOME/llamasup/config.yaml``."""
    given = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    base = Path(given) if given.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".config"
    return base / "llamasup" / "config.yaml"


def system_config() -> Path:
    return Path("/etc/llamasup/config.yaml")


def find_config(given: Path | None, environ: Mapping[str, str]) -> Path:
    """``given`` (``--config``), else ``$LLAMASUP_CONFIG``, else the first that is there of the user's and the
    machine's.

    What somebody names is taken whether it is there or not: another one must not be used in its place.
    Raises ConfigInvalid where none is named and none is there.
    """
    named = given or (Path(environ[VARIABLE]) if environ.get(VARIABLE) else None)
    if named is not None:
        try:
            return named.expanduser().absolute()
        except RuntimeError:  # ~name
            raise ConfigInvalid(f"The config {str(named)!r}: there is no such user.") from None
    places = (own_config(environ), system_config())
    for place in places:
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # it may be there: reading it says what is wrong
        return place
    raise ConfigInvalid(
        f"There is no config: neither {' nor '.join(map(str, places))} is there, and ${VARIABLE} is not set.",
        remedy="Make one with llamasup config init, or name one with --config; or serve a folder without: "
        "llamasup serve --models-dir FOLDER.",
    )


_REFERENCE = re.compile(r"\$(\$(?=\{))|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|\$\{")


class Unset(Exception):
    """Something that cannot be replaced; the text says what, and what to do."""


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """``$${`` is a plain ``${``. What comes from the environment is not looked into again. Raises Unset."""

    def value(found: re.Match[str]) -> str:
        escape, name, default = found.groups()
        if escape:
            return "$"
        if name is None:
            raise Unset("'${' begins the name of a variable, as in ${HOME}; a plain one is written $${")
        known = environ.get(name)
        if default is not None:
            return known or default
        if known is None:
            raise Unset(
                f"the environment has no {name}; set it, or give a value for then: ${{{name}:-value}}"
            )
        return known

    return _REFERENCE.sub(value, text)
