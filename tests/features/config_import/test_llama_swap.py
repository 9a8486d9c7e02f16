"""llama-swap's configs become configs of llamasup, and nothing of them is lost."""

from __future__ import annotations

from itertools import pairwise
from textwrap import dedent
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llamasup.errors import ConfigInvalid
from llamasup.features.config_import.draft import Draft
from llamasup.features.config_import.llama_swap import from_llama_swap
from tests.features.config_import.accounts import NOW, config_from, issues_of, lost, plain
from tests.kit.extent import examples

# Every key of llama-swap v250; models are planned.
ALL = """
    healthCheckTimeout: 500
    logLevel: info
    logTimeFormat: rfc3339
    logToStdout: both
    logRequests: true
    store: {path: /var/swap.sqlite}
    metricsMaxInMemory: 700
    captureBuffer: 15
    ui: {activity: {session_id: [X-Session-Id]}}
    performance: {disabled: true, every: 15s}
    startPort: 10001
    sendLoadingState: true
    includeAliasesInList: true
    globalTTL: 600
    unloadTimeout: 11
    macros:
      bin: /opt/llama/llama-server --port ${PORT}
      ctx: 4096
      heat: 0.5
      args: --ctx-size ${ctx} --temp ${heat}
    apiKeys: [sk-hunter2, "${env.API_KEY}"]
    upstream: {ignorePaths: ['.*[.]js$']}
    profiles: {day: {description: By day, pins: {llm: qwen, image-gen: ~}}}
    selectors:
      best: {strategy: warm, targets: [qwen, fast], name: Best, description: Warm, metadata: {purpose: x}}
      fixed: {strategy: pin, targets: [fast, qwen], unlisted: true}
      more: {strategy: spillover, targets: [fast, embed], settings: {spillover: 4}}
    models:
      qwen:
        macros: {ctx: 16384}
        cmd: |
          # ${bin} is a macro
          ${bin} \\
            --model ${env.MODELS}/qwen.gguf ${args} -ngl 99
        name: Qwen 3
        description: A model
        env: ["CUDA_VISIBLE_DEVICES=0,1", LLAMA_ARG_TOP_K=20, HF_TOKEN=secret, OTHER=1]
        proxy: http://127.0.0.1:${PORT}
        checkEndpoint: /ready
        cmdStop: kill ${PID}
        ttl: 60
        unloadTimeout: 7
        compat: {ignoreWebsockets: true}
        useModelName: org/qwen
        filters:
          stripParams: "top_p, top_k, model"
          setParams: {temperature: 0.7, top_p: 0.9}
          setParamsByID:
            "${MODEL_ID}:high": {chat_template_kwargs: {reasoning_effort: high}}
            "${MODEL_ID}": {temperature: 0.2}
        aliases: [gpt-4o-mini, "qwen:high"]
        metadata: {port: "${PORT}", list: [1, 1.25]}
        concurrencyLimit: 3
        sendLoadingState: false
        timeouts: {connect: 30, keepalive: 31, responseHeader: 60, tlsHandshake: 10, idleConn: 90}
        capabilities: {in: [text, image], out: [text], tools: true, reranker: false, context: 32000}
        unlisted: true
        healthCheckTimeout: 20
      fast:
        cmd: env LLAMA_ARG_THREADS=2 llama-server -hf org/fast:Q4_K_M --alias quick,swift
        ttl: 0
        concurrencyLimit: 0
        aliases: [speedy]
      embed: {cmd: "llama-server -m /m/e.gguf --embedding", ttl: -1}
      "GPT OSS (20B)": {cmd: llama-server.exe -m C.gguf}
    hooks: {on_startup: {preload: [gpt-4o-mini, absent]}}
    routing:
      router:
        use: group
        settings:
          groups:
            one: {members: [qwen, speedy]}
            all: {swap: false, exclusive: false, persistent: true, members: [embed]}
          matrix: {vars: {q: qwen}, evict_costs: {q: 50}, sets: {pair: q & fast}}
      scheduler: {use: fifo, settings: {fifo: {priority: {qwen: 10}}}}
    peers:
      other: {proxy: "http://10.0.0.2", apiKey: sk-peer, models: [a/b], filters: {stripParams: top_k}}
    newKey: {of: later}
"""


def translated(text: str) -> Draft:
    return from_llama_swap(dedent(text), NOW)


def test_each_key_of_a_config_is_a_value_or_in_a_comment() -> None:
    source, draft = yaml.safe_load(dedent(ALL)), translated(ALL)
    text, _ = draft.checked(issues_of)
    assert lost(source, text) == []
    assert not any(secret in text for secret in ("hunter2", "API_KEY", "sk-peer", "secret"))


def test_values_mean_the_same() -> None:
    config = config_from(translated(ALL.replace(', model"', '"')), MODELS="/m")
    qwen, fast = config.models["qwen:unfiltered"], config.models["fast"]
    assert (qwen.path, qwen.ctx_size, qwen.ttl_s, qwen.drain_timeout_s) == ("/m/qwen.gguf", 16384, 60, 7)
    assert (qwen.devices, qwen.max_concurrent, qwen.preload) == (("CUDA0", "CUDA1"), 3, True)
    assert qwen.extra == ("--top-k", "20", "--temp", "0.5")
    assert (fast.repo, fast.aliases, fast.ttl_s) == (
        "org/fast:Q4_K_M",
        ("quick", "swift", "speedy"),
        float("inf"),
    )
    assert (config.models["embed"].ttl_s, config.models["embed"].extra) == (None, ("--embedding",))
    assert config.models["GPT-OSS-20B"].aliases == ("GPT OSS (20B)",)
    assert (config.defaults.ttl_s, config.defaults.drain_timeout_s) == (600, 11)
    assert config.groups == {"one": ("qwen:unfiltered", "fast")}
    virtual = config.features["virtual_models"]
    assert (virtual["qwen"].model, virtual["qwen"].set) == (
        "qwen:unfiltered",
        {"temperature": 0.2, "top_p": 0.9},
    )
    assert virtual["qwen"].remove == ("top_k",)
    assert virtual["qwen:high"].set == {
        "temperature": 0.7,
        "top_p": 0.9,
        "chat_template_kwargs": {"reasoning_effort": "high"},
    }
    assert virtual["gpt-4o-mini"].model == "qwen"
    assert [virtual[name].any for name in ("best", "fixed", "more")] == [
        *(("qwen", "fast"), ("fast",), ("fast", "embed"))
    ]


# A model, and the text of its command.
COMMANDS = [
    pytest.param(
        "{cmd: 'whisper-server --port ${PORT}', checkEndpoint: /v1/ready}",
        {"command": ["whisper-server", "--port", "{port}"], "health": "/v1/ready"},
        id="a port of llama-swap",
    ),
    pytest.param(
        "{cmd: 'sd --listen 9999 --size 19999', proxy: 'http://127.0.0.1:9999/x'}",
        {"command": ["sd", "--listen", "{port}", "--size", "19999"], "health": "/health"},
        id="a port of its own",
    ),
    pytest.param(
        "{cmd: 'docker run --name ${MODEL_ID} -p ${PORT}:8080 image -m x', cmdStop: 'docker stop x'}",
        {
            "command": ["docker", "run", "--name", "x", "-p", "{port}:8080", "image", "-m", "x"],
            "health": "/health",
            "stop": ["docker", "stop", "x"],
        },
        id="a container",
    ),
    pytest.param(
        "{cmd: 'vllm ${PORT}', env: [A=b c, HF_TOKEN=x], cmdStop: 'kill ${PID}', checkEndpoint: none}",
        {"command": ["env", "A=b c", "vllm", "{port}"], "environment": ["HF_TOKEN"]},
        id="an environment",
    ),
    pytest.param(
        "{cmd: 'ssh host llama-server -m x', aliases: [y], useModelName: org/z}",
        {
            "command": ["ssh", "host", "llama-server", "-m", "x"],
            "health": "/health",
            "aliases": ["y", "org/z"],
        },
        id="a llama-server elsewhere",
    ),
    pytest.param(
        "{cmd: 'say \"hello'}", {"command": ["say", '"hello'], "health": "/health"}, id="an open quote"
    ),
    pytest.param("{}", {"command": [], "health": "/health"}, id="no command"),
]


@pytest.mark.parametrize(("model", "expected"), COMMANDS)
def test_other_engines_become_models_with_a_command(model: str, expected: dict[str, Any]) -> None:
    draft = translated(f"models:\n  x: {model}\n")
    assert draft.config["models"]["x"] == {**expected, "routes": ["/v1/*"]}
    assert lost(yaml.safe_load(model), draft.text()) == []
    has_address = any("{port}" in word for word in expected["command"])
    text, issues = draft.checked(issues_of)
    assert ("x" in (yaml.safe_load(text).get("models") or {})) is has_address
    assert (issues == ()) is has_address  # without a model, there is nothing to serve


def test_ids_that_become_one_name_stay_two_models() -> None:
    cmd = "{cmd: llama-server -m %s.gguf, filters: {setParams: {top_k: %s}}}"
    config = config_from(translated(f"models: {{a b: {cmd % ('x', 1)}, a-b: {cmd % ('y', 2)}}}"))
    assert list(config.models) == ["a-b_1:unfiltered", "a-b:unfiltered"]
    virtual = config.features["virtual_models"]
    assert {name: (entry.model, entry.set) for name, entry in virtual.items()} == {
        "a-b_1": ("a-b_1:unfiltered", {"top_k": 1}),
        "a-b": ("a-b:unfiltered", {"top_k": 2}),
    }


def test_command_without_a_port_gets_a_hint() -> None:
    assert "Write {port} where" in plain(translated("models: {x: {cmd: serve 80}}").text())
    assert "Write {port}" not in translated("models: {x: {cmd: 'serve ${PORT}'}}").text()


def test_macros_are_written_out_as_llama_swap_does() -> None:
    text = """
        macros: {a: "1 ${MODEL_ID}", c: true, b: "${a} ${c}", n: 7, "d": "$n ${b}"}
        models:
          x: {macros: {a: own, z: "${d}"}, cmd: 'e ${z} ${PORT} ${none}', metadata: {n: "${n}", d: ["${c}"]}}
    """
    draft = translated(text)
    command = draft.config["models"]["x"]["command"]
    assert command == ["e", "$n", "own", "true", "{port}", "$${none}"]
    assert "metadata: {n: 7, d: [true]}" in plain(draft.text())


_LISTS = "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in pairwise("abcdefgh"))
_MACROS = "".join(f"  {new}: '{f'${{{old}}}' * 9}'\n" for old, new in pairwise("abcdefgh"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {", "while parsing"),
        ("- a", "no mapping"),
        ("", "no mapping"),
        ("a: 2026-99-99", "month must be"),
        ("a: &a [*a]", "recursion"),
        pytest.param(f"a: &a [1]\n{_LISTS}", "more than", id="a bomb of aliases"),
        pytest.param(
            f"macros:\n  a: x\n{_MACROS}models: {{x: {{cmd: '${{h}}'}}}}", "more than", id="of macros"
        ),
    ],
)
def test_what_is_no_config_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        translated(text)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "models: [a]",
        "models: {a: ~, 7: {cmd: 5, env: A, aliases: b, filters: x, ttl: [], macros: z}}",
        "macros: x\ngroups: {g: ~}\nselectors: {s: {strategy: pin}}\nhooks: 7\nrouting: {router: 1}",
        "models: {'': {cmd: llama-server -c 9999999999, unloadTimeout: ~}}\ngroups: {'..': {members: [a]}}",
        "models: {a: {cmd: 'llama-server -m \"\\x00${\"', ttl: -5, concurrencyLimit: x}}\nglobalTTL: x",
    ],
)
def test_odd_values_are_left_out(text: str) -> None:
    _, issues = translated(text).checked(issues_of)
    assert all(not issue.key or issue.key == "models" for issue in issues), issues


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["cmd", "env", "filters", "aliases", "ttl", "proxy", "macros", "checkEndpoint", "x", "groups"]
)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.dictionaries(st.text(max_size=9), st.dictionaries(KEYS, VALUES)),
)
def test_any_values_give_a_valid_config(top: dict[str, Any], models: dict[str, Any]) -> None:
    text = yaml.safe_dump({**top, "models": {**models, "m": {"cmd": "llama-server -m x"}}})
    _, issues = translated(text).checked(issues_of)
    assert issues == ()
