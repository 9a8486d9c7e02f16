"""What llamasup can do without: the rest works if one of these features is deleted."""

from __future__ import annotations

import pytest

from scripts.delete_features import DELETABLE, results


@pytest.mark.parametrize("name", DELETABLE)
def test_rest_imports_and_shows_its_help_without_the_feature(name: str) -> None:
    ((found, lines, error),) = results([name], quick=True)
    assert (found, error) == (name, "")
    assert lines > 0
