"""What the fork server imports (tests/e2e/forked.py): all that a command may need."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys

from typer.testing import CliRunner

import llamasup
from llamasup.cli.app import app
from tests.kit.patience import wait_longer_for_answers

_NEVER_IMPORTED = ("llamasup.embedded", "llamasup.__main__")
_OF_LINUX = ("llamasup.core.system.process.exec_child", "llamasup.core.system.native.linux")
_OF_POSIX = ("llamasup.core.system.native.macos", "llamasup.core.system.native.posix")
_OF_WINDOWS = ("llamasup.core.system.native.windows",)
_OF_ANOTHER_SYSTEM = (
    *(() if sys.platform == "linux" else _OF_LINUX),
    *(_OF_POSIX if sys.platform == "win32" else _OF_WINDOWS),
)

for module in pkgutil.walk_packages(llamasup.__path__, "llamasup."):
    if not module.name.startswith((*_NEVER_IMPORTED, *_OF_ANOTHER_SYSTEM)):
        importlib.import_module(module.name)
wait_longer_for_answers()
CliRunner().invoke(app, ["inspect", "--help"])  # Typer imports the rest of itself at the first call
gc.freeze()
