"""Settings files that get the settings of a client, and keep everything else."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import yaml

from llamasup.features.connect.clients import CLIENTS, Connection
from llamasup.features.connect.merge import CannotMerge, difference, merged, rendered

TO = Connection("http://127.0.0.1:8080", 'a "model"', "sk-1", 4096)
OTHER = Connection("http://127.0.0.1:9090", "other", "sk-2")


def add(client: str, text: str, to: Connection = TO) -> str:
    return merged(text, CLIENTS[client].settings(to).values, CLIENTS[client].format)


READ: dict[str, Any] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}


@pytest.mark.parametrize("client", [name for name, client in CLIENTS.items() if client.file])
def test_new_file_has_exactly_the_settings_and_a_second_time_changes_nothing(client: str) -> None:
    values, format_ = CLIENTS[client].settings(TO).values, CLIENTS[client].format
    text = add(client, " \n")
    assert text == rendered(values, format_)
    assert READ[format_](text) == values
    assert add(client, text) == text
    assert difference(text, add(client, text), "f", "sk-1") == ""


# --- JSON --------------------------------------------------------------------------------------------


def test_other_keys_of_json_stay_in_their_order() -> None:
    before = {"theme": "Größe", "env": {"PATH_X": "1", "ANTHROPIC_MODEL": "opus"}, "hooks": []}
    after = json.loads(add("claude-code", json.dumps(before)))
    assert list(after) == ["theme", "env", "hooks"]
    assert (after["theme"], after["env"]["PATH_X"]) == ("Größe", "1")
    assert after["env"]["ANTHROPIC_MODEL"] == 'a "model"'


def test_entry_of_the_same_name_in_a_list_is_replaced_and_others_stay() -> None:
    text = add("zed", add("zed", "{}", OTHER))
    models = json.loads(text)["language_models"]["openai_compatible"]["llamasup"]["available_models"]
    assert [model["name"] for model in models] == ["other", 'a "model"']
    assert add("zed", text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("// comment\n{}", "it is not plain JSON"),
        ("[]", "it is not a JSON object"),
        ("{" * 3, "it is not plain JSON"),
        ("[" * 100_000, "it is not plain JSON"),
        ('{"x": "\\ud800"}', "it has a character that is not valid Unicode"),
    ],
)
def test_json_that_cannot_be_kept_is_refused(text: str, why: str) -> None:
    with pytest.raises(CannotMerge, match=why):
        add("claude-code", text)


# --- TOML --------------------------------------------------------------------------------------------

CODEX = """\
# my settings
model = "gpt"   # the best
approval_policy = "never"

[model_providers.llamasup] # old
name = "x"
base_url = "http://old"

[tools]
web = true
"""


def test_toml_keeps_comments_and_other_tables() -> None:
    after = add("codex", CODEX)
    top = "model_auto_compact_token_limit = 3072\nmodel_context_window = 4096\n"
    assert after.startswith(f'{top}model_provider = "llamasup"\n# my settings\nmodel = "a \\"model\\""\n')
    assert "[tools]\nweb = true\n" in after
    assert "http://old" not in after
    assert tomllib.loads(after) == {
        "model": 'a "model"',
        "model_provider": "llamasup",
        "model_context_window": 4096,
        "model_auto_compact_token_limit": 3072,
        "approval_policy": "never",
        "tools": {"web": True},
        "model_providers": CLIENTS["codex"].settings(TO).values["model_providers"],
    }
    assert add("codex", after) == after


def test_toml_without_tables_gets_one() -> None:
    assert tomllib.loads(add("codex", "a = 1"))["model_providers"]["llamasup"]["wire_api"] == "responses"


def test_other_providers_of_toml_stay() -> None:
    after = tomllib.loads(add("codex", '[model_providers.mine]\nname = "m"\n'))
    assert list(after["model_providers"]) == ["mine", "llamasup"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = ", "it is not valid TOML"),
        ('model_providers = { llamasup = { name = "x" } }\n', "its tables are written in a way"),
        ('model_providers.llamasup.name = "x"\n', "its tables are written in a way"),
        ('note = """\nmodel = 3\n"""\n', "its tables are written in a way"),
        ("model_providers = 3\n", "its tables are written in a way"),
    ],
)
def test_toml_that_cannot_be_kept_is_refused(text: str, why: str) -> None:
    with pytest.raises(CannotMerge, match=why):
        add("codex", text)


# --- YAML --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        "name: Mine\nmodels:\n  - name: x # mine\n    provider: ollama\nrules: []\n",
        "name: Mine\nmodels: # all\n- name: x\n  provider: ollama\n",
        "name: Mine\nmodels:\n",
        "name: Mine\n# end",
    ],
)
def test_yaml_keeps_its_text_and_gets_the_model(before: str) -> None:
    after = add("continue", before)
    old = yaml.safe_load(before)
    (model,) = CLIENTS["continue"].settings(TO).values["models"]
    assert yaml.safe_load(after) == {**old, "models": [model, *(old.get("models") or [])]}
    assert all(line in after.splitlines() for line in before.splitlines())
    assert add("continue", after) == after


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "it is not valid YAML"),
        ("- a", "it has no keys at the top"),
        ("models: [{name: x}]\n", "its list of models is written in a way"),
        ("models:\n  a: b\n", "its list of models is written in a way"),
        ("models:\n  - name: 'a \"model\" (llamasup)'\n", "it has another model of the name"),
    ],
)
def test_yaml_that_cannot_be_kept_is_refused(text: str, why: str) -> None:
    with pytest.raises(CannotMerge, match=why):
        add("continue", text)


def test_difference_does_not_show_the_key() -> None:
    shown = difference("{}", add("claude-code", "{}"), "settings.json", "sk-1")
    assert "+++ settings.json" in shown
    assert '+    "ANTHROPIC_AUTH_TOKEN": "(the key)",' in shown
    assert "sk-1" not in shown
    assert "(the key)" not in difference("a", "b", "f", "")
