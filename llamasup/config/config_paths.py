"""Where a config is looked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llamasup.core.errors import ConfigInvalid

__all__ = ["VARIABLE", "find_config", "own_config", "system_config"]

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
