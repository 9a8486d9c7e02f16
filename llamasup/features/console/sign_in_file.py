"""A private file that leads a browser to the console and signs it in.

Every user of a machine may read the arguments of its processes. So a browser gets the path of this file, and
not the address with the token. An effect: it writes and removes files.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path

from llamasup.core.system.storage.folders import atomic_write
from llamasup.features.console.sessions import TOKEN_S

_NAME = "console-{}.html"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>llamasup</title>
<script>location.replace({address})</script>
<noscript>The console needs JavaScript.</noscript></html>
"""


def write_sign_in_file(folder: Path, address: str) -> Path:
    """Write the file for ``address`` into a private folder, and remove those whose token is too old.

    Raises OSError.
    """
    path = folder / _NAME.format(secrets.token_hex(8))
    in_script = json.dumps(address).replace("<", "\\u003c")  # it cannot end the script
    atomic_write(path, _PAGE.format(address=in_script).encode())
    written_s = path.stat().st_mtime
    for other in folder.glob(_NAME.format("*")):
        with contextlib.suppress(OSError):
            if other.stat().st_mtime < written_s - TOKEN_S:
                other.unlink()
    return path
