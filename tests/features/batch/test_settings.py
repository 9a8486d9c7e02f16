"""The section ``batches`` of a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.config.reading import issue_of
from tests.core.config.test_commands import missing, written


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("true", "'true'; expected a mapping, such as {enabled: true}"),
    ],
)
def test_invalid_section_is_refused(section: str, message: str) -> None:
    found = issue_of(f"models_dir: m\nbatches: {section}\n")
    assert found.startswith("c.yaml:2: batches")
    assert message in found


def test_folder_with_other_files_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path, "models_dir: .\nbatches: {enabled: true, folder: .}\n")
    assert missing(path) == [
        f"c.yaml:2: batches.folder: The folder '{tmp_path}' cannot be used: it has other files, such as "
        "'c.yaml'; choose an empty folder, or one that does not exist"
    ]
