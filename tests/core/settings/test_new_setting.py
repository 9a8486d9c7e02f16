"""A setting needs one declaration, and something that reads it: shown by adding one to a copy of llamasup."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from llamasup.core.config.config_keys import Auth, Config, Http, Memory, Slots
from llamasup.core.settings.declaration import SettingGroup, settings_of
from llamasup.core.settings.kinds import Section
from llamasup.core.settings.model import ModelSettings
from llamasup.features import config_keys
from tests.kit.paths import ROOT

# What settings are called where they are read.
_OF_MODELS = {"settings", "options"}
# The rooms that declare, read and show settings. What only these read has no effect.
_ABOUT_SETTINGS = ("settings", "config", "cli", "api")
_ENTRY = """    warmth: int | None = setting(
        Integer(0, 9), "How warm it is.", "lukewarm", flag=Flag(help="Warmth of the model.")
    )
"""
_BEFORE = "    check_memory: bool | None = setting("


def unread(package: Path, fields: set[str], receivers: set[str]) -> set[str]:
    """The ``fields`` that no module reads from a variable or an attribute with the name of a receiver."""
    seen = {
        field
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in _ABOUT_SETTINGS
        for receiver, field in _reads(path.read_text())
        if receiver in receivers
    }
    return fields - seen


@cache
def _reads(source: str) -> frozenset[tuple[str, str]]:
    """Every pair of a receiver and a field that this source reads from the receiver.

    ``getattr(options, name) for name in NAMES`` reads the fields that the constant ``NAMES`` lists. A source
    is parsed once: nine tests read all sources, and the copy has the same ones except two.
    """
    tree = ast.parse(source)
    seen: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            seen.add((_name(node.value), node.attr))
        elif isinstance(node, ast.DictComp) and isinstance(node.value, ast.Call):
            call = node.value
            if _name(call.func) == "getattr":
                receiver = _name(call.args[0])
                seen |= {(receiver, field) for field in _constant(tree, _name(node.generators[0].iter))}
    return frozenset(seen)


def _name(node: ast.expr) -> str:
    """The last name of ``a.b.c``, and of a call."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _constant(tree: ast.Module, name: str) -> set[str]:
    """The texts in the value of a constant."""
    texts = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(_name, targets):
                texts |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return {text for text in texts if isinstance(text, str)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llamasup with one more setting, and nothing that reads it."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("llamasup", "scripts", "docs"):  # with the compiled modules, which stay valid in the copy
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("images"))
    declarations = root / "llamasup" / "core" / "settings" / "model.py"
    text = declarations.read_text()
    assert text.count(_BEFORE) == 1
    declarations.write_text(text.replace(_BEFORE, _ENTRY + _BEFORE))
    assert python(root, "scripts/docs.py", "keys", "arguments").returncode == 0
    return root


def python(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
    return subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True)


def test_every_setting_of_a_model_is_read() -> None:
    assert unread(ROOT / "llamasup", set(ModelSettings.__struct_fields__), _OF_MODELS) == set()


# Config itself reads these, for others.
_READ_BY_CONFIG = {"listen", "keep"}


@pytest.mark.parametrize(
    ("group", "receivers"),
    [
        (Config, "config initial"),
        (Memory, "memory"),
        (Auth, "auth"),
        (Http, "http"),
        (Slots, "slots"),
        *(
            (key.setting.kind.keys, f"{key.name} of settings _settings")
            for key in config_keys()
            if isinstance(key.setting.kind, Section)
        ),
    ],
)
def test_every_setting_of_a_section_is_read(group: type[SettingGroup], receivers: str) -> None:
    fields = {field for field, _ in settings_of(group).values()}
    assert unread(ROOT / "llamasup", fields - _READ_BY_CONFIG, set(receivers.split())) == set()


def test_setting_that_nothing_reads_is_found(copy: Path) -> None:
    fields = {*ModelSettings.__struct_fields__, "warmth"}
    assert unread(copy / "llamasup", fields, _OF_MODELS) == {"warmth"}


def test_setting_whose_use_was_removed_is_found(copy: Path) -> None:
    """The plan still has a field of the same name."""
    plan = copy / "llamasup" / "core" / "planning" / "plan.py"
    text = plan.read_text()
    assert text.count("nice=settings.nice,") == 1
    plan.write_text(text.replace("nice=settings.nice,", ""))
    try:
        assert unread(copy / "llamasup", set(ModelSettings.__struct_fields__), _OF_MODELS) == {"nice"}
    finally:
        plan.write_text(text)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_new_setting_is_an_option(copy: Path, command: str) -> None:
    shown = python(copy, "-m", "llamasup", command, "--help").stdout
    assert "--warmth N" in shown
    assert "Warmth of the model." in shown


def test_new_setting_is_a_key_of_a_config_with_its_limits(copy: Path) -> None:
    config = copy / "config.yaml"
    config.write_text("models_dir: .\ndefaults: {warmth: 10}\nmodels: {demo: {path: demo, warmth: 3}}\n")
    checked = python(copy, "-m", "llamasup", "config", "check", str(config))
    assert checked.returncode == 78
    assert "defaults.warmth" in checked.stderr
    assert "10" in checked.stderr
    assert "models" not in checked.stderr


def test_new_setting_is_in_the_json_schema(copy: Path) -> None:
    schema = json.loads(python(copy, "-m", "llamasup", "config", "schema").stdout)
    found = schema["$defs"]["ModelKeys"]["properties"]["warmth"]
    assert "How warm it is." in json.dumps(found)
    assert "9" in json.dumps(found)


def test_new_setting_is_an_argument_in_python(copy: Path) -> None:
    code = (
        "import llamasup\n"
        "from typing import get_type_hints\n"
        "from llamasup.api.inputs import entry_of\n"
        "assert entry_of('demo', {'warmth': 3}).warmth == 3\n"
        "assert get_type_hints(llamasup.ModelArguments)['warmth'] == int | None\n"
        "try: entry_of('demo', {'warmth': 10})\n"
        "except llamasup.UsageInvalid as error: print(error.message)\n"
    )
    assert "warmth: invalid value 10" in python(copy, "-c", code).stdout


def test_new_setting_is_in_the_documentation(copy: Path) -> None:
    page = (copy / "docs" / "configuration.md").read_text()
    (row,) = [entry for entry in page.split("\n- ") if entry.startswith("`warmth`:")]
    assert "How warm it is." in row
    assert "lukewarm" in row
