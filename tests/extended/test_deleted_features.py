"""What llamasup can do without: the rest works if one of these features is deleted."""

from __future__ import annotations

import pytest

from llamasup.features import FEATURES
from scripts.delete_features import HELD, results


@pytest.mark.parametrize("name", [feature.name for feature in FEATURES if feature.name not in HELD])
def test_rest_imports_and_shows_its_help_without_the_feature(name: str) -> None:
    ((found, lines, error),) = results([name], quick=True)
    assert (found, error) == (name, "")
    assert lines > 0
