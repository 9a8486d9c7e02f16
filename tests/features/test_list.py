"""The list of features and what it names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from llamasup import features
from llamasup.cli.app import COMMANDS
from llamasup.core.settings.declaration import ConfigKey
from llamasup.errors import UsageInvalid
from llamasup.features import FEATURES, Feature, attached, key_of_option


def test_each_folder_of_a_feature_is_in_the_list() -> None:
    folders = [path.parent.name for path in Path(features.__file__).parent.glob("*/__init__.py")]
    assert sorted(feature.name for feature in FEATURES) == sorted(folders)


def test_modules_of_a_feature_exist() -> None:
    for feature in FEATURES:
        for module in (*feature.modules, *(entry.module for entry in feature.entries)):
            assert find_spec(module) is not None, module


def test_each_command_of_a_feature_is_in_a_section_of_the_help() -> None:
    shown = [entry for section in COMMANDS.values() for entry in section]
    assert len({entry.name for entry in shown}) == len(shown)
    assert {entry for feature in FEATURES for entry in feature.entries} <= set(shown)


def test_each_seam_has_what_its_entries_name() -> None:
    seams = Feature._fields[Feature._fields.index("modules") + 1 :]
    for seam in seams:
        found = list(attached(seam))
        assert found, seam
        for what in found:
            assert callable(what) or isinstance(what, ConfigKey)


def test_option_of_a_missing_feature_says_that_it_is_not_here() -> None:
    assert key_of_option("batches", "--batches").name == "batches"
    with pytest.raises(UsageInvalid, match="built without the feature of --fly"):
        key_of_option("fly", "--fly")
