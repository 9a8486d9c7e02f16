"""``scripts/count.py`` counts what it says, and has a bound for each count."""

from __future__ import annotations

from pathlib import Path

from scripts import count

SOURCE = '''"""Of a page."""

import os
from llamasup.features.batch import lines


# A comment.
def decide() -> None:
    """Decide.

    Twice.
    """
    first = 1

    second = 2
'''


def test_lines_of_code_are_without_blanks_comments_docstrings_and_imports(tmp_path: Path) -> None:
    core = tmp_path / "llamasup" / "core"
    core.mkdir(parents=True)
    (core / "rules.py").write_text(SOURCE)
    (core / "__init__.py").touch()
    found = count.counts(tmp_path)
    assert found["lines of code in llamasup/core"] == 3
    assert found["files in llamasup"] == 2
    assert found["imports of features in the core"] == ["llamasup/core/rules.py:4 llamasup.features.batch"]
    assert found["packages without a docstring"] == ["llamasup/core/__init__.py"]
    assert found["fragments"] == ["llamasup/core/rules.py:1 Of a page."]
    assert found["files above 500 lines"] == []
    assert found.keys() == count.BOUNDS.keys()
