"""The names and values of request parameters in a config."""

from __future__ import annotations

import re

import pytest

from llamasup.core.config.nodes import plain_value
from llamasup.core.settings.kinds import InvalidValue
from llamasup.features.virtual.parameters import ParameterName, check_parameter


@pytest.mark.parametrize("name", ["temperature", "speculative.n_max", "brand_new_option", "lora"])
def test_known_and_new_names_are_accepted(name: str) -> None:
    assert ParameterName().parse(name) == name
    assert re.search(str(ParameterName().schema()["pattern"]), name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", ""),
        ("a b", ""),
        ("a" * 65, ""),
        ("temprature", "llama-server would ignore it; did you mean temperature?"),
        ("Top_K", "llama-server would ignore it; did you mean top_k?"),
        ("model", "a virtual model cannot change it: the key model of the virtual model names it"),
        ("n", "a virtual model cannot change it: limits count the answers that the client requests"),
        ("stream", "a virtual model cannot change it: the client decides how it reads the answer"),
        ("reasoning_budget", "requests have no parameter of this name; use thinking_budget_tokens"),
    ],
)
def test_other_names_are_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        ParameterName().parse(name)
    assert refused.value.why == why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1),
        ("temperature", 0.5),
        ("top_k", 40),
        ("stop", "x"),
        ("stop", ["x"]),
        ("cache_prompt", True),
        ("grammar", "root ::= x"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("logit_bias", [[1, False]]),
        ("brand_new_option", None),
    ],
)
def test_fitting_values_are_accepted(name: str, value: object) -> None:
    check_parameter(name, value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("temperature", "hot", "expected a number"),
        ("temperature", True, "expected a number"),
        ("temperature", None, "expected a number"),
        ("top_k", 0.5, "expected a whole number"),
        ("cache_prompt", 1, "expected true or false"),
        ("grammar", 1, "expected text"),
        ("stop", 1, "expected a list or text"),
        ("chat_template_kwargs", "x", "expected keys and values"),
    ],
)
def test_values_that_llama_server_refuses_or_ignores_are_refused(name: str, value: object, why: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_parameter(name, value)
    assert refused.value.why == why


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("FALSE", False),
        ("", None),
        ("~", None),
        ("0", 0),
        ("-12", -12),
        ("0.6", 0.6),
        ("1e-3", 0.001),
        ("0." + "3" * 60, 1 / 3),
        ("-" + "9" * 18, -(10**18) + 1),
        ("1" * 19 + ".5", 1.1111111111111112e18),
        ("1e0001", 10.0),
        ("no", "no"),
        ("080", "080"),
        ("1:30", "1:30"),
        (".nan", ".nan"),
        (".inf", ".inf"),
        ("hello", "hello"),
    ],
)
def test_text_without_quotes_is_read_as_in_json(text: str, value: object) -> None:
    found = plain_value(text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["1" * 19, "-" + "9" * 40, "1e999", "1e99999", "9" * 400 + ".5"])
def test_number_that_is_too_large_is_refused_and_no_text(text: str) -> None:
    with pytest.raises(InvalidValue, match="too large"):
        plain_value(text)
