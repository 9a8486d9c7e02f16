"""The examples in docs/configuration.md are right."""

from __future__ import annotations

import re
from pathlib import Path

from llamasup.service.config_check import environment_issues
from tests.core.config.reading import config_of
from tests.core.config.test_json_schema import errors_of
from tests.kit.configs import read
from tests.kit.paths import ROOT

PAGE = (ROOT / "docs" / "configuration.md").read_text()


def test_example_is_a_valid_config() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)

    config = config_of(example)
    assert list(config.models) == ["qwen", "*embed*"]
    assert errors_of(example) == []


def test_errors_are_those_of_check(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "listen: 127.0.0.1:8080\n\ndefaults: {ctxsize: 8192}\n\nmodels:\n  qwen: {\n    pin: yes,\n"
        "    path: demo}\n  coder: {path: models/coder.gguf}\n"
    )

    reading, found = read(path, {})
    issues = sorted((*found, *environment_issues(reading, {})))

    folder = "/home/ann/.config/llamasup"
    for issue in issues:
        message = issue.in_file(f"{folder}/config.yaml").replace(f"{tmp_path}/models", "/home/ann/models")
        assert f"    {message}\n" in PAGE
    assert len(issues) == 3
