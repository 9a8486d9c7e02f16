"""Options of a request in Ollama's API: each is honoured or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.core.settings.declaration import settings_of
from llamasup.core.settings.model import ModelSettings
from llamasup.features.ollama import fields as fields_module
from llamasup.features.ollama.fields import (
    OPTIONS,
    Fields,
    Fixed,
    Number,
    Refused,
    Removed,
    Whole,
    decoded,
    setting_of,
)


def of_kind(kind: type) -> list[str]:
    return [name for name, option in OPTIONS.items() if isinstance(option, kind)]


def fields(value: dict[str, Any]) -> Fields:
    return decoded(json.dumps(value).encode())


def parameters(request: dict[str, Any], **more: Any) -> dict[str, Any]:
    return fields_module.parameters(fields(request), **more)


def without_effect(request: dict[str, Any], **more: Any) -> tuple[str, ...]:
    return fields_module.without_effect(fields(request), **more)


def refused(given: Any, **more: Any) -> str:
    with pytest.raises(Refused) as caught:
        parameters({"options": given}, **more)
    return f"{caught.value.error.message}: {caught.value.error.remedy}"


def test_options_become_the_parameters_of_llama_server() -> None:
    given = {"num_predict": 100, "seed": 42, "num_keep": 5, "temperature": 0.8, "top_k": 20, "stop": ["\n"]}
    assert parameters({"options": given}) == {
        "n_predict": 100,
        "seed": 42,
        "n_keep": 5,
        "temperature": 0.8,
        "top_k": 20,
        "stop": ["\n"],
    }


def test_request_without_options_has_no_parameters() -> None:
    assert parameters({}) == parameters({"options": None}) == parameters({"options": {"top_p": None}}) == {}


@pytest.mark.parametrize("name", of_kind(Number))
def test_number_keeps_its_name(name: str) -> None:
    assert parameters({"options": {name: 0.5}}) == {name: 0.5}
    assert name in refused({name: "high"})


@pytest.mark.parametrize("name", of_kind(Whole))
def test_whole_number_has_a_range(name: str) -> None:
    option = OPTIONS[name]
    assert isinstance(option, Whole)
    assert parameters({"options": {name: option.most}}) == {option.own: option.most}
    for value in (option.least - 1, option.most + 1, "5", True, 1.5):
        assert name in refused({name: value})


@pytest.mark.parametrize("name", of_kind(Fixed))
@pytest.mark.parametrize("value", [1, -1, True, "auto"])
def test_option_that_changes_no_text_is_accepted_without_effect(name: str, value: object) -> None:
    assert not setting_of(name) or setting_of(name) in settings_of(ModelSettings)
    for samples in (True, False):
        assert parameters({"options": {name: value}}, samples=samples) == {}
        assert without_effect({"options": {name: value, "seed": None}}, samples=samples) == (name,)


@pytest.mark.parametrize("name", of_kind(Removed))
def test_option_that_llama_server_does_not_have_is_refused(name: str) -> None:
    assert f"the option {name} does not exist" in refused({name: True})


def test_unknown_option_is_refused() -> None:
    assert "there is no option 'temprature'" in refused({"temprature": 1})


def test_options_must_be_an_object() -> None:
    assert "options is an array" in refused([])


def test_one_stop_may_be_a_string() -> None:
    assert parameters({"options": {"stop": "end"}}) == {"stop": ["end"]}
    assert "stop" in refused({"stop": ["a", 1]})
    assert "stop" in refused({"stop": 1})


def test_embeddings_take_no_sampling_option() -> None:
    sampling = {"temperature": 0, "seed": 1, "stop": ["a"], "num_ctx": 5, "mirostat_tau": None}
    assert parameters({"options": sampling}, samples=False) == {}
    assert without_effect({"options": sampling}, samples=False) == ("temperature", "seed", "stop", "num_ctx")
    assert without_effect({"options": sampling}) == ("num_ctx",)
    assert "there is no option" in refused({"temprature": 1}, samples=False)
