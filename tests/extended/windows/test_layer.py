"""The layer of Windows: files, locks, rights, processes and pipes."""

from __future__ import annotations

from pathlib import Path

from tests.extended.windows import layer
from tests.extended.windows.wine import Windows, windows_path


def test_what_the_layer_promises_holds_on_windows(windows: Windows) -> None:
    folder = windows.folder / "Übung"
    folder.mkdir()
    checks = windows.python(windows_path(Path(str(layer.__file__))), windows_path(folder))
    checks.close_stdin()
    assert checks.wait() == 0, checks.errors
    assert checks.output().split() == [check.__name__ for check in layer.CHECKS]
