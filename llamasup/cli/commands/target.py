"""Which llamasup a command talks to: the one that runs here, one of several, or one elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from llamasup.auth.key_source import client_key
from llamasup.control.choose import choose
from llamasup.control.client import Place
from llamasup.control.discovery import look
from llamasup.errors import UsageInvalid

__all__ = ["reach"]

VARIABLE = "LLAMASUP_URL"


def reach(*, pid: int | None, url: str | None, api_key_file: Path | None) -> Place:
    """Raises NotRunning, UsageInvalid (several run, or the options contradict each other), ConfigInvalid."""
    if pid is not None and url is not None:
        raise UsageInvalid("--pid and --url name two different ones.", remedy="Leave one of them out.")
    if pid is None and url is None:
        url = os.environ.get(VARIABLE) or None
    if url is None:
        if api_key_file is not None:
            raise UsageInvalid(
                "--api-key-file without --url: no key is needed on this machine.",
                remedy=f"Leave it out, or give --url (or ${VARIABLE}).",
            )
        return Place(socket=choose(look(), pid).socket)
    full = url if "://" in url else f"http://{url}"
    if "@" in full.split("/")[2]:  # it would be seen in errors, and by ps
        raise UsageInvalid(
            "The URL that is given holds a user's name or a password.",
            remedy="Leave them out; a key comes from --api-key-file or $LLAMASUP_API_KEY.",
        )
    return Place(url=full, api_key=client_key(api_key_file, os.environ))
