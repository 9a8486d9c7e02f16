"""Presets of llama.cpp's router become models."""

from __future__ import annotations

from textwrap import dedent

from llamasup.features.config_import.preset import from_preset, sections_of
from tests.features.config_import.accounts import NOW, config_from, plain

PRESET = """
    version = 1
    ; for all models
    [*]
    ctx-size = 131072
    c = 8192  # the last one counts
    threads = 8
    temp = 0.6
    sleep-idle-seconds = 600

    [ggml-org/gemma-GGUF:Q8_0]
    chat-template = chatml
    n-gpu-layers = 123
    jinja = true
    LLAMA_ARG_CACHE_RAM = 0
    metrics = false
    dedup-cache-models = true

    [ custom model ]
    model = /m/custom.gguf
    mmproj = ${dir}/p.gguf
    temp = 1.0
    ctx-size = 4096
    load-on-startup = true
    stop-timeout = 20
    made-up = 1
    no line
"""


def test_presets_become_models_with_the_shared_keys() -> None:
    draft = from_preset(dedent(PRESET), NOW)
    config = config_from(draft)
    gemma, custom = config.models["ggml-org/gemma-GGUF:Q8_0"], config.models["custom-model"]
    assert (gemma.repo, gemma.path, gemma.ctx_size, gemma.ttl_s) == (
        "ggml-org/gemma-GGUF:Q8_0",
        None,
        8192,
        600,
    )
    assert gemma.extra == ("--temperature", "0.6", "--chat-template", "chatml", "--cache-ram", "0")
    assert (custom.path, custom.extra, custom.preload) == ("/m/custom.gguf", ("--temperature", "1.0"), True)
    assert custom.ctx_size == 4096
    assert (custom.drain_timeout_s, custom.aliases) == (20, ("custom model",))
    assert custom.mmproj is not None
    assert custom.mmproj.endswith("${dir}/p.gguf")
    text = plain(draft.text())
    for commented in (
        "version",
        "--threads 8 → planned",
        "--n-gpu-layers 123 → planned",
        "--jinja → planned",
    ):
        assert commented in text, text
    for commented in ("metrics = false →", "dedup-cache-models = true →", "--made-up 1 → left out"):
        assert commented in text, text


def test_sections_have_the_last_value_of_each_key() -> None:
    assert sections_of("a = 1\n[x] ; y\na=2#c\n[y]\n[x]\na = 3\nb = c = d") == {
        "": {"a": "1"},
        "x": {"a": "3", "b": "c = d"},
        "y": {},
    }
