"""The body of a request for a virtual model, and what stays byte for byte."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Route, route_of
from llamasup.features.virtual.rewrite import rewritten
from llamasup.features.virtual.settings import Candidate, Changes
from tests.core.http.test_requested_model import form, part

CHAT = "/v1/chat/completions"
TO_CHAT = route_of(CHAT.encode())
USER = {"role": "user", "content": "Hi"}


def to(path: str) -> Route:
    return route_of(path.encode())


def sent(body: dict[str, Any] | bytes, *changes: Changes, label: str = CHAT) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = rewritten(raw, to(label), "v", Candidate("m", changes))
    assert isinstance(found, bytes), found
    return json.loads(found)


def refusal(body: bytes, *changes: Changes, label: str = CHAT) -> HttpError:
    found = rewritten(body, to(label), "v", Candidate("m", changes))
    assert isinstance(found, HttpError)
    return found


def test_only_the_model_is_replaced_if_nothing_else_is_asked_for() -> None:
    body = b'{"model" : "v", "messages":[ {"role":"user","content":"\\u00e9 1.50e3"} ],"top_k":1.50}'
    assert rewritten(body, TO_CHAT, "v", Candidate("m")) == (
        b'{"model":"m","messages":[ {"role":"user","content":"\\u00e9 1.50e3"} ],"top_k":1.50}'
    )


def test_body_without_a_model_gets_one() -> None:
    assert sent({"prompt": "x"}) == {"prompt": "x", "model": "m"}


def test_parameter_is_set_whatever_the_client_sends() -> None:
    changes = Changes(set={"temperature": 0.2})
    assert sent({"temperature": 1}, changes)["temperature"] == 0.2
    assert sent({}, changes)["temperature"] == 0.2


def test_default_counts_if_the_client_sends_nothing_or_null() -> None:
    changes = Changes(default={"temperature": 0.2})
    assert sent({"temperature": 1}, changes)["temperature"] == 1
    assert sent({"temperature": None}, changes)["temperature"] == 0.2
    assert sent({}, changes)["temperature"] == 0.2


def test_parameter_is_removed() -> None:
    assert sent({"top_k": 3, "top_p": 1}, Changes(remove=("top_k", "min_p"))) == {"top_p": 1, "model": "m"}


def test_keys_of_mappings_are_merged() -> None:
    body = {"chat_template_kwargs": {"enable_thinking": True, "style": "x"}}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False, "effort": 1}}
    assert sent(body, Changes(set=kwargs))["chat_template_kwargs"] == {
        "enable_thinking": False,
        "style": "x",
        "effort": 1,
    }
    assert sent(body, Changes(default=kwargs))["chat_template_kwargs"] == {
        "enable_thinking": True,
        "style": "x",
        "effort": 1,
    }


@pytest.mark.parametrize("parameter", ["json_schema", "response_format", "thinking"])
def test_mapping_whose_keys_belong_together_is_not_merged(parameter: str) -> None:
    own, value = {"type": "enabled", "budget_tokens": 9}, {"type": "disabled", "x": 1}
    assert sent({parameter: own}, Changes(default={parameter: value}))[parameter] == own
    assert sent({parameter: own}, Changes(set={parameter: value}))[parameter] == value


def test_biases_are_merged_only_if_both_are_mappings() -> None:
    for value, after in (({"b": 2}, {"a": 1, "b": 2}), ([["b", 2]], [["b", 2]])):
        assert sent({"logit_bias": {"a": 1}}, Changes(set={"logit_bias": value}))["logit_bias"] == after
    default = Changes(default={"logit_bias": [["b", 2]]})
    assert sent({"logit_bias": {"a": 1}}, default)["logit_bias"] == {"a": 1}


def test_mapping_of_another_type_is_left_to_llama_server_or_replaced() -> None:
    kwargs = {"chat_template_kwargs": {"a": 1}}
    assert sent({"chat_template_kwargs": 3}, Changes(default=kwargs))["chat_template_kwargs"] == 3
    assert sent({"chat_template_kwargs": 3}, Changes(set=kwargs))["chat_template_kwargs"] == {"a": 1}


@pytest.mark.parametrize(
    ("label", "name"),
    [
        (CHAT, "max_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/completion", "n_predict"),
        ("/v1/completions", "max_tokens"),
    ],
)
def test_length_of_an_answer_has_one_name_in_each_api(label: str, name: str) -> None:
    assert sent({}, Changes(set={"max_completion_tokens": 7}), label=label) == {name: 7, "model": "m"}
    body = {"max_completion_tokens": 9, "n_predict": 8}
    assert sent(body, Changes(set={"max_tokens": 7}), label=label) == {name: 7, "model": "m"}
    assert sent(body, Changes(default={"max_tokens": 7}), label=label) == {**body, "model": "m"}
    assert sent(body, Changes(remove=("max_tokens",)), label=label) == {"model": "m"}


def test_changes_apply_one_after_the_other() -> None:
    first = Changes(set={"seed": 1}, system="first")
    second = Changes(default={"seed": 2, "top_k": 3}, remove=("min_p",), system="second")
    assert sent({"messages": [USER], "min_p": 0}, first, second) == {
        "messages": [{"role": "system", "content": "second\n\nfirst"}, USER],
        "seed": 1,
        "top_k": 3,
        "model": "m",
    }


# --- system prompts ----------------------------------------------------------------------------------

BRIEF = Changes(system="Be brief.")


@pytest.mark.parametrize(
    ("messages", "after"),
    [
        ([USER], [{"role": "system", "content": "Be brief."}, USER]),
        ([], [{"role": "system", "content": "Be brief."}]),
        (
            [{"role": "system", "content": "You are a fox."}, USER],
            [{"role": "system", "content": "Be brief.\n\nYou are a fox."}, USER],
        ),
        (
            [{"role": "developer", "content": [{"type": "text", "text": "Fox."}]}],
            [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "Be brief.\n\n"}, {"type": "text", "text": "Fox."}],
                }
            ],
        ),
        ([{"role": "system"}], [{"role": "system", "content": "Be brief."}]),
        ([{"role": "system", "content": None}], [{"role": "system", "content": "Be brief."}]),
        ([{"role": "system", "content": 5}], [{"role": "system", "content": "Be brief."}]),
        (["x"], ["x"]),
        ([{"role": 5}], [{"role": 5}]),
        ("x", "x"),
    ],
)
def test_system_prompt_goes_in_front_of_a_chat(messages: Any, after: Any) -> None:
    for label in (CHAT, "/apply-template", "/v1/chat/completions/input_tokens"):
        assert sent({"messages": messages}, BRIEF, label=label)["messages"] == after


def test_chat_without_messages_is_left_to_llama_server() -> None:
    assert sent({}, BRIEF) == {"model": "m"}


def test_system_prompt_of_anthropic_messages() -> None:
    for label in ("/v1/messages", "/v1/messages/count_tokens"):
        assert sent({"messages": [USER]}, BRIEF, label=label)["system"] == "Be brief."
        assert sent({"system": "Fox."}, BRIEF, label=label)["system"] == "Be brief.\n\nFox."
        parts = [{"type": "text", "text": "Fox.", "cache_control": {"type": "ephemeral"}}]
        assert sent({"system": parts}, BRIEF, label=label)["system"] == [
            {"type": "text", "text": "Be brief.\n\n"},
            *parts,
        ]


def test_system_prompt_of_responses_are_instructions() -> None:
    assert sent({"input": "x"}, BRIEF, label="/v1/responses")["instructions"] == "Be brief."
    body = {"input": "x", "instructions": "Fox."}
    assert sent(body, BRIEF, label="/v1/responses")["instructions"] == "Be brief.\n\nFox."


@pytest.mark.parametrize("content", [None, 5, True, {}, {"type": "text", "text": "Fox."}])
@pytest.mark.parametrize(("label", "field"), [("/v1/messages", "system"), ("/v1/responses", "instructions")])
def test_value_that_llama_server_ignores_does_not_replace_the_system_prompt(
    label: str, field: str, content: Any
) -> None:
    assert sent({field: content}, BRIEF, label=label)[field] == "Be brief."


def test_instructions_that_are_a_list_do_not_replace_the_system_prompt() -> None:
    body = {"instructions": [{"type": "text", "text": "Fox."}]}
    assert sent(body, BRIEF, label="/v1/responses")["instructions"] == "Be brief."


@pytest.mark.parametrize(
    "label", ["/completion", "/v1/completions", "/infill", "/v1/audio/transcriptions", "/v1/systemone"]
)
def test_system_prompt_without_a_place_is_refused(label: str) -> None:
    error = refusal(b'{"prompt":"x"}', BRIEF, label=label)
    assert (error.status, error.cause) == (400, "virtual_model_system")
    assert error.message == f"The virtual model 'v' has a system prompt, for which {label} has no place"


def test_system_prompt_on_an_unknown_path_is_refused_with_the_reason() -> None:
    error = refusal(b'{"prompt":"x"}', BRIEF, label="/v1/newer")
    assert (error.status, error.cause) == (400, "virtual_model_system")
    assert error.message == (
        "The virtual model 'v' has a system prompt, and llamasup does not know where requests to this path "
        "have one"
    )
    assert sent({"prompt": "x"}, Changes(set={"seed": 1}), label="/v1/newer")["seed"] == 1


@pytest.mark.parametrize(
    "label", ["/tokenize", "/v1/embeddings", "/rerank", "/v1/chat/completions/control", "/props"]
)
def test_requests_that_generate_nothing_need_no_system_prompt(label: str) -> None:
    assert sent({"content": "x"}, BRIEF, label=label) == {"content": "x", "model": "m"}


@pytest.mark.parametrize(
    "body", [b"[]", b"3", b"{", b"--form", b"\xff", b'{"a":' + b"[" * 100_000, b'{"a":1}\0x']
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    error = refusal(body, Changes(set={"seed": 1}))
    assert (error.status, error.cause) == (400, "virtual_model_body")
    assert error.remedy == "send JSON, or use the model 'm' itself"


def test_form_gets_the_name_of_the_model_if_nothing_else_is_asked_for() -> None:
    def upload(name: bytes) -> bytes:
        return form(part("file", bytes(99), 'filename="a.wav"'), part("model", name), part("n", b"1"))

    label = "/v1/audio/transcriptions"
    assert rewritten(upload(b"v"), to(label), "v", Candidate("m")) == upload(b"m")
    assert refusal(upload(b"v"), Changes(set={"seed": 1}), label=label).cause == "virtual_model_body"
    assert refusal(b"[]").cause == "virtual_model_body"


def test_form_without_a_model_stays_as_it_is() -> None:
    nameless = form(part("n", b"1"))  # the query names the model
    assert rewritten(nameless, to("/v1/audio/transcriptions"), "v", Candidate("m")) == nameless


def test_large_form_is_not_checked_as_if_it_were_json() -> None:
    audio = part("file", b'["' * 300_000, 'filename="a.wav"')
    found = rewritten(form(audio, part("model", b"v")), to("/v1/audio/transcriptions"), "v", Candidate("m"))
    assert found == form(audio, part("model", b"m"))


@pytest.mark.parametrize("body", [b'\xef\xbb\xbf{"a":1}', b'{"a":1}\0\0', b'\xef\xbb\xbf{"a":1}\0'])
def test_what_llama_server_skips_is_left_out(body: bytes) -> None:
    assert sent(body) == {"a": 1, "model": "m"}


# --- large bodies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [b'"a":[' + b'"x",' * 200_000 + b"1]", b",".join(b'"%d":0' % at for at in range(120_000))],
)
def test_body_with_too_many_strings_is_refused(field: bytes) -> None:
    error = refusal(b"{%b}" % field, BRIEF)
    assert (error.status, error.cause) == (400, "body_too_complex")
    assert error.message == "The virtual model 'v' changes requests, and this one is too complex for it"
    assert error.remedy is not None
    assert error.remedy.endswith("or use the model 'm' itself")


@pytest.mark.parametrize(
    ("label", "field"),
    [(CHAT, "messages"), ("/v1/messages", "system"), ("/v1/responses", "instructions")],
)
def test_list_of_many_items_is_never_decoded(label: str, field: str) -> None:
    items = 500_000
    body = b'{"%b":[{"role":"user"}%b]}' % (field.encode(), b",0" * items)
    tracemalloc.start()
    try:
        found = rewritten(body, to(label), "v", Candidate("m", (BRIEF,)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, bytes)
    assert most < 10 * len(body)  # an object for each item takes 30 times the body


def test_other_messages_stay_byte_for_byte() -> None:
    body = b'{"messages":[ {"role":"system", "content":"Fox."} , {"role": "user","content":"\\u00e9"} ]}'
    assert rewritten(body, TO_CHAT, "v", Candidate("m", (BRIEF,))) == (
        b'{"messages":[{"role":"system","content":"Be brief.\\n\\nFox."} ,'
        b' {"role": "user","content":"\\u00e9"} ],"model":"m"}'
    )
