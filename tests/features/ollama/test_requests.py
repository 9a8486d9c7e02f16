"""Requests in Ollama's API → requests of llama-server: each field is honoured or refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from msgspec import structs

from llamasup.features.ollama.fields import Refused
from llamasup.features.ollama.requests import (
    PATHS,
    Features,
    Kind,
    OllamaRequest,
    check_features,
    read_request,
)

HI = [{"role": "user", "content": "hi"}]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def read(path: str, features: Features | None = None, **fields: Any) -> OllamaRequest:
    body = json.dumps({"model": "m", **fields}).encode()
    found = read_request(f"/api/{path}".encode(), body, lambda name: features or Features())
    return structs.replace(found, body=json.loads(msgspec.json.encode(found.body)))


def refused(path: str, features: Features | None = None, **fields: Any) -> str:
    with pytest.raises(Refused) as caught:
        read(path, features, **fields)
    assert caught.value.error.status == 400
    return f"{caught.value.error.message}: {caught.value.error.remedy}"


def chat(**fields: Any) -> dict[str, Any]:
    return read("chat", messages=HI, stream=False, **fields).body


def generate(**fields: Any) -> dict[str, Any]:
    return read("generate", prompt="hi", stream=False, **fields).body


# --- all paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_request_must_name_a_model(path: bytes) -> None:
    for body in (b"{}", b'{"model":null}', b'{"model":""}'):
        with pytest.raises(Refused, match="model is required"):
            read_request(path, body, lambda name: Features())
    with pytest.raises(Refused, match="model is the number 5"):
        read_request(path, b'{"model":5}', lambda name: Features())


@pytest.mark.parametrize("path", PATHS)
def test_older_clients_call_the_model_name(path: bytes) -> None:
    assert read_request(path, b'{"name":"m"}', lambda name: Features()).name == "m"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("chat", {"messages": HI}),
        ("generate", {"prompt": "x"}),
        ("embed", {"input": "x"}),
        ("embeddings", {"prompt": "x"}),
    ],
)
def test_time_and_options_without_effect_are_kept_for_later(path: str, field: dict[str, Any]) -> None:
    found = read(path, options={"num_ctx": 512}, keep_alive="5m", **field)
    assert (found.idle, found.keep_s, found.loads) == (("num_ctx",), 300.0, False)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("chat", Kind.CHAT),
        ("generate", Kind.GENERATE),
        ("embed", Kind.EMBED),
        ("embeddings", Kind.EMBEDDINGS),
    ],
)
def test_request_without_a_prompt_loads_the_model(path: str, kind: Kind) -> None:
    found = read(path, keep_alive=0)
    assert (found.kind, found.loads, found.keep_s) == (kind, True, 0.0)
    assert found.embeds == path.startswith("embed")
    assert (found.path, found.body) == (b"/tokenize", {"content": ""})
    assert "option" in refused(path, options={"x": 1})


# --- chat ------------------------------------------------------------------------------------------


def test_chat_is_streamed_unless_it_says_no() -> None:
    found = read("chat", messages=HI)
    assert (found.kind, found.path) == (Kind.CHAT, b"/v1/chat/completions")
    assert found.body == {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    assert chat() == {"messages": HI}
    assert "stream is" in refused("chat", messages=HI, stream="no")


def test_options_are_parameters_of_a_chat() -> None:
    assert chat(options={"num_predict": 3})["n_predict"] == 3


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        [1],
        [{"content": "hi"}],
        [{"role": "oracle", "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "images": "x"}],
        [{"role": "assistant", "tool_calls": [5]}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ],
)
def test_wrong_message_is_refused(messages: Any) -> None:
    assert refused("chat", messages=messages).startswith("messages")


def test_role_may_have_capitals_and_thinking_is_passed_on() -> None:
    (message,) = read("chat", messages=[{"role": "Assistant", "content": "yes", "thinking": "hm"}]).body[
        "messages"
    ]
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_tool_calls_of_the_history_have_ids_and_their_results_too() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    history = [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call, {"id": "own", "function": {"name": "clock"}}],
        },
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "more"},
    ]
    _, assistant, clock, weather, more = read("chat", messages=history).body["messages"]
    assert assistant["tool_calls"] == [
        {
            "id": "call_1_0",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        },
        {"id": "own", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    assert (clock["tool_call_id"], clock["name"]) == ("own", "clock")
    assert (weather["tool_call_id"], weather["name"]) == ("call_1_0", "weather")
    assert (more["tool_call_id"], "name" in more) == ("call", False)


def test_result_with_an_unknown_id_takes_no_other_call() -> None:
    calls = [{"id": name, "function": {"name": name}} for name in ("a", "b")]
    history = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "lost"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    _, lost, first, second = read("chat", messages=history).body["messages"]
    assert (lost["tool_call_id"], "name" in lost) == ("lost", False)
    assert [(each["tool_call_id"], each["name"]) for each in (first, second)] == [("a", "a"), ("b", "b")]


def test_result_with_an_id_belongs_to_its_call() -> None:
    calls = [{"id": name, "function": {"name": name}} for name in ("a", "b")]
    history = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "b"},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    _, first, second = read("chat", messages=history).body["messages"]
    assert [(each["tool_call_id"], each["name"]) for each in (first, second)] == [("b", "b"), ("a", "a")]


def test_tools_are_passed_on_unless_the_model_has_none() -> None:
    assert chat(tools=[WEATHER])["tools"] == [WEATHER]
    assert read("chat", Features(calls_tools=True), messages=HI, tools=[WEATHER]).body["tools"] == [WEATHER]
    assert "tools" not in chat(tools=[])
    assert "does not support tools" in refused(
        "chat", Features(calls_tools=False), messages=HI, tools=[WEATHER]
    )
    wrong: Any
    for wrong in ([5], [{}], [{"function": {"name": 5}}], "x"):
        assert refused("chat", messages=HI, tools=wrong)


# --- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "media"),
    [
        (b"\x89PNG\r\n\x1a\n", "png"),
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (b"GIF89a", "gif"),
        (b"BM\0\0", "bmp"),
        (b"RIFF\0\0\0\0WEBP", "webp"),
    ],
)
def test_image_is_sent_as_the_url_of_its_data(start: bytes, media: str) -> None:
    image = base64.b64encode(start + bytes(20)).decode()
    found = read("chat", messages=[{"role": "user", "content": "look", "images": [image]}])
    (message,) = found.body["messages"]
    assert found.has_webp is (media == "webp")
    assert message["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": f"data:image/{media};base64,{image}"}},
    ]


@pytest.mark.parametrize(
    "image", [5, None, "", "http://example.net/x.png", "data:image/png;base64,AAAA", "AAAAAAAA", "A", "é"]
)
def test_invalid_image_is_refused(image: object) -> None:
    assert "images[0] is " in refused("chat", messages=[{"role": "user", "images": [image]}])
    assert "images[0] is " in refused("generate", prompt="x", images=[image])


def test_message_may_have_only_an_image() -> None:
    body = read("generate", images=[PNG]).body
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url"]


# --- format, think, logprobs -----------------------------------------------------------------------


def test_format_is_json_or_a_schema() -> None:
    schema = {"type": "object"}
    assert chat(format="json")["response_format"] == {"type": "json_object"}
    assert chat(format=schema)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"schema": schema},
    }
    assert "response_format" not in chat(format="") | chat(format=None)
    wrong: Any
    for wrong in ("xml", 5, [], True):
        assert "format is neither" in refused("chat", messages=HI, format=wrong)


def test_think_switches_the_thoughts_of_a_model_that_has_them() -> None:
    thinker = Features(reasons=True)
    on = read("chat", thinker, messages=HI, think=True).body
    high = read("chat", thinker, messages=HI, think="high").body
    off = read("chat", thinker, messages=HI, think=False).body
    assert on["chat_template_kwargs"] == {"enable_thinking": True}
    assert high["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}
    assert (off["chat_template_kwargs"], off["thinking_budget_tokens"]) == ({"enable_thinking": False}, 0)
    assert "chat_template_kwargs" in chat(think=True)  # not known: llama-server decides
    assert "chat_template_kwargs" not in chat()


def test_think_is_refused_for_a_model_without_thoughts() -> None:
    plain = Features(reasons=False)
    assert "does not support thinking" in refused("chat", plain, messages=HI, think=True)
    assert "does not support thinking" in refused("generate", plain, prompt="x", think="low")
    assert "chat_template_kwargs" not in read("chat", plain, messages=HI, think=False).body
    wrong: Any
    for wrong in ("much", 5, []):
        assert "think is neither" in refused("chat", messages=HI, think=wrong)


def test_logprobs_of_tokens_and_of_their_alternatives() -> None:
    assert chat(logprobs=True)["top_logprobs"] == 1
    assert not read("chat", messages=HI, logprobs=True).alternatives
    found = read("chat", messages=HI, logprobs=True, top_logprobs=3)
    assert (found.body["top_logprobs"], found.alternatives) == (3, True)
    assert "logprobs" not in chat(logprobs=False, top_logprobs=0)
    assert "without logprobs" in refused("chat", messages=HI, top_logprobs=3)
    assert "top_logprobs is 21" in refused("chat", messages=HI, logprobs=True, top_logprobs=21)


@pytest.mark.parametrize("path", ["chat", "generate"])
@pytest.mark.parametrize("field", ["shift", "_debug_render_only"])
def test_field_that_would_change_the_prompt_is_refused(path: str, field: str) -> None:
    assert f"{field} is not supported" in refused(path, None, **{field: True})
    read(path, None, **{field: False})


@pytest.mark.parametrize("path", ["chat", "generate", "embed"])
def test_truncate_may_say_anything_because_no_prompt_is_cut(path: str) -> None:
    assert read(path, truncate=True) == read(path, truncate=False) == read(path)
    assert "truncate is" in refused(path, truncate="yes")


@pytest.mark.parametrize("path", ["chat", "generate"])
@pytest.mark.parametrize(
    "field",
    [
        {"format": 5},
        {"think": 0},
        {"think": "zz"},
        {"logprobs": 0},
        {"logprobs": True, "top_logprobs": "zz"},
        {"top_logprobs": 5},
        {"stream": "yes"},
        {"options": {"x": 1}},
        {"keep_alive": "soon"},
    ],
)
def test_field_of_a_request_without_a_prompt_is_checked(path: str, field: dict[str, Any]) -> None:
    assert refused(path, None, **field)


def test_other_fields_of_a_request_without_a_prompt_are_checked() -> None:
    assert "tools is the string" in refused("chat", messages=[], tools="zz")
    assert "tools[0]" in refused("chat", tools=[{"function": 5}])
    assert "system is" in refused("generate", system=5)
    assert "raw is" in refused("generate", raw="yes")
    assert "images is" in refused("generate", images=5)


@pytest.mark.parametrize("what", [{"raw": True}, {"suffix": "x"}])
@pytest.mark.parametrize(
    "field", [{"top_logprobs": "zz"}, {"top_logprobs": 5}, {"think": 0}, {"logprobs": 0}, {"format": 5}]
)
def test_field_is_checked_without_a_chat_template(what: dict[str, Any], field: dict[str, Any]) -> None:
    assert next(iter(field)) in refused("generate", Features(insert=(7, 8, 9)), prompt="hi", **what, **field)


def test_request_knows_what_its_model_must_be_able_to_do() -> None:
    found = read("chat", messages=HI, tools=[WEATHER], think="low")
    assert (found.calls_tools, found.thinks) == (True, True)
    with pytest.raises(Refused, match="does not support tools"):
        check_features(found, Features(calls_tools=False))
    with pytest.raises(Refused, match="does not support thinking"):
        check_features(found, Features(reasons=False))
    plain = read("chat", messages=HI, think=False)
    assert (plain.calls_tools, plain.thinks) == (False, False)
    check_features(plain, Features(reasons=False, calls_tools=False))


# --- generate --------------------------------------------------------------------------------------


def test_prompt_becomes_a_message_after_that_of_the_system() -> None:
    found = read("generate", prompt="hi", system="be brief")
    assert (found.kind, found.path) == (Kind.GENERATE, b"/v1/chat/completions")
    assert found.body["messages"] == [{"role": "system", "content": "be brief"}, *HI]
    assert generate(format="json", options={"top_k": 1})["messages"] == HI


def test_raw_prompt_has_no_template() -> None:
    found = read("generate", prompt="[INST] hi", raw=True, options={"seed": 1})
    assert (found.kind, found.path) == (Kind.RAW, b"/completion")
    assert found.body == {"seed": 1, "prompt": "[INST] hi", "stream": True}
    assert "stream" not in generate(raw=True)


def test_suffix_lets_the_model_fill_in_the_middle() -> None:
    """/infill of llama-server would cut a long text; /completion refuses a prompt that does not fit."""
    coder = Features(insert=(7, 8, 9))
    found = read("generate", coder, prompt="def f(", suffix="return x", stream=False)
    assert (found.kind, found.path) == (Kind.RAW, b"/completion")
    assert found.body == {"prompt": ["", 7, "def f(", 8, "return x", 9]}
    assert read("generate", coder, suffix="x").body == {"prompt": ["", 7, "", 8, "x", 9], "stream": True}


def test_suffix_is_refused_for_a_model_that_cannot_fill_in_the_middle() -> None:
    assert "does not support suffix" in refused("generate", Features(insert=()), prompt="a", suffix="b")
    assert "load the model first" in refused("generate", prompt="a", suffix="b")


@pytest.mark.parametrize("what", [{"raw": True}, {"suffix": "x"}])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("system", "be brief"),
        ("images", [PNG]),
        ("format", "json"),
        ("think", True),
        ("logprobs", True),
    ],
)
def test_field_of_a_chat_is_refused_without_its_template(
    what: dict[str, Any], field: str, value: Any
) -> None:
    coder = Features(insert=(7, 8, 9))
    assert f"{field} is not supported together with" in refused(
        "generate", coder, prompt="hi", **what, **{field: value}
    )
    assert read("generate", coder, prompt="hi", **what, **{field: None}).path == b"/completion"


def test_template_and_context_are_refused() -> None:
    assert "template is not supported" in refused("generate", prompt="hi", template="{{ .Prompt }}")
    assert "context is not supported" in refused("generate", prompt="hi", context=[1, 2])
    assert generate(template="", context=[]) == generate()


# --- embeddings ------------------------------------------------------------------------------------


def test_texts_are_embedded() -> None:
    one, two = read("embed", input="a"), read("embed", input=["a", "b"], dimensions=4)
    assert (one.kind, one.path, one.body) == (Kind.EMBED, b"/v1/embeddings", {"input": ["a"]})
    assert (two.body, two.dimensions) == ({"input": ["a", "b"]}, 4)
    assert read("embed", input="a", dimensions=0).dimensions is None


def test_older_path_takes_one_text_and_does_not_normalize() -> None:
    found = read("embeddings", prompt="a")
    assert (found.kind, found.body) == (Kind.EMBEDDINGS, {"input": "a", "embd_normalize": -1})


def test_wrong_input_is_refused() -> None:
    wrong: Any
    for wrong in (5, {}, [1], ["a", None], [[1]]):
        assert "input" in refused("embed", input=wrong)
    assert "dimensions is -1" in refused("embed", input="a", dimensions=-1)


def test_empty_input_loads_the_model() -> None:
    assert all(read("embed", input=value).loads for value in ("", [], [""], None))
    assert read("embeddings", prompt="").loads
