"""docs/configuration.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

from llamasup.cli.commands.config_check import environment_issues
from llamasup.config.reading import read
from tests.config.reading import config_of
from tests.config.test_schema import errors_of
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "configuration.md").read_text()


def test_its_example_is_a_config() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)

    config = config_of(example)
    assert list(config.models) == ["qwen", "*embed*"]
    assert errors_of(example) == []


def test_its_mistakes_are_told_like_that(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "listen: 127.0.0.1:8080\n\ndefaults: {ctxsize: 8192}\n\nmodels:\n  qwen: {\n    pin: yes,\n"
        "    path: demo}\n  coder: {path: models/coder.gguf}\n"
    )

    reading, issues = read(path, {})
    told = sorted((*issues, *environment_issues(reading, {})))

    folder = "/home/ann/.config/llamasup"
    for issue in told:
        said = issue.in_file(f"{folder}/config.yaml").replace(f"{tmp_path}/models", "/home/ann/models")
        assert f"    {said}\n" in PAGE
    assert len(told) == 3
