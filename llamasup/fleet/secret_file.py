"""Finds the secret of the fleet: in ``$LLAMASUP_FLEET_SECRET`` or in its file."""

from __future__ import annotations

import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from llamasup.core.system.storage.folders import atomic_write, read_bounded
from llamasup.errors import ConfigInvalid
from llamasup.fleet.settings import Fleet

VARIABLE = "LLAMASUP_FLEET_SECRET"
_SECRET = re.compile(r"[!-~]{32,1024}")


def fleet_secret(fleet: Fleet, environ: Mapping[str, str], *, create: bool = False) -> str:
    """Return the secret. ``create``: make a secret and its file if there is none. Raises ConfigInvalid."""
    if given := environ.get(VARIABLE):
        return _checked(given.strip(), f"${VARIABLE}")
    path = fleet.key_file or default_file()
    try:
        content, status = read_bounded(path, 2048)
    except FileNotFoundError:
        if not create:
            raise ConfigInvalid(
                f"There is no secret of the fleet: {str(path)!r} does not exist, and ${VARIABLE} is unset.",
                remedy="Copy the file from the machine that ran `llamasup fleet deploy`, with mode 0600.",
            ) from None
        secret = secrets.token_urlsafe(32)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, f"{secret}\n".encode(), durable=True)
        except OSError as error:
            raise ConfigInvalid(
                f"The secret of the fleet cannot be written to {str(path)!r}: {error.strerror}.",
                remedy="Name a file in `fleet.key_file` that this user can write.",
            ) from None
        return secret
    except (OSError, ValueError) as error:
        raise ConfigInvalid(
            f"The secret of the fleet cannot be read: {getattr(error, 'strerror', None) or error}.",
            remedy="Give the path of a readable file in `fleet.key_file`.",
        ) from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigInvalid(
            "Other users can read the file with the secret of the fleet, and could use all nodes with it.",
            remedy="chmod 600 the file of `fleet.key_file`.",
        )
    return _checked(content.decode(errors="replace").strip(), "The file of `fleet.key_file`")


def default_file() -> Path:
    """Return ``~/.config/llamasup/fleet.key``, or the equivalent of the platform."""
    import platformdirs

    return platformdirs.user_config_path("llamasup", appauthor=False) / "fleet.key"


def _checked(secret: str, what: str) -> str:
    if not _SECRET.fullmatch(secret):
        raise ConfigInvalid(
            f"{what} has {len(secret)} characters, or characters that are not printable ASCII.",
            remedy="A secret of a fleet is one line of 32 to 1,024 printable characters without blanks, such "
            "as the output of `openssl rand -base64 32`.",
        )
    return secret
