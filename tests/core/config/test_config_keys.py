"""The values of a valid config."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from llamasup.core.config.config_keys import Config, RuntimeChoice
from llamasup.core.http.address import TcpAddress, UnixAddress
from llamasup.core.models.rules import ModelRule
from llamasup.core.settings.model import ModelSettings
from llamasup.core.settings.units import Size, duration_text, read_duration, read_size
from llamasup.errors import ConfigInvalid
from llamasup.features.downloads.settings import DOWNLOADS
from tests.core.config.reading import config_of
from tests.kit.configs import load


def test_example_of_the_contract_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
listen: 127.0.0.1:8080
runtime: auto
models_dir: ~/models
memory: {ram: 80%, vram: 90%}
defaults: {ctx_size: 8192, parallel: 4, kv_type: q8_0, flash_attn: auto, ttl: 10m}
models:
  qwen:
    path: qwen2.5-7b-q4_k_m.gguf
    aliases: [gpt-4o-mini]
    preload: true
auth: {api_key_file: ~/.config/llamasup/keys}
"""
    )

    config = load(path, {"HOME": "/home/ann"})

    assert config.listen == (TcpAddress("127.0.0.1", 8080),)
    assert config.runtime.path is None
    assert config.models_dir == (Path("/home/ann/models"),)
    assert (config.memory.ram, config.memory.vram) == (Size(percent=80), Size(percent=90))
    assert config.default_options == ModelSettings(
        ctx_size=8192, parallel=4, kv_type="q8_0", flash_attn="auto", ttl_s=600.0
    )
    assert config.rules == (
        ModelRule(
            "qwen",
            str(tmp_path / "qwen2.5-7b-q4_k_m.gguf"),
            ("gpt-4o-mini",),
            ModelSettings(preload=True),
            f"{path}:8",
        ),
    )
    assert config.auth.api_key_file == Path("/home/ann/.config/llamasup/keys")


def test_all_settings_of_a_model_reach_its_options() -> None:
    config = config_of(
        """
        models:
          m:
            path: demo
            ctx_size: 1
            parallel: 2
            gpu_layers: all
            threads: 3
            kv_type: f16
            flash_attn: on
            draft_model: d.gguf
            mmproj: ../p.gguf
            profile: throughput
            loras: [~/a.gguf, /b.gguf]
            devices: CUDA0
            extra: [--seed, 42, --no-mmap]
            check_memory: false
            warm_up: false
            ttl: never
            pin: true
            preload: true
            replicas: 2
            keep_slots: true
            max_concurrent: 4
            max_queued: 0
            wait_timeout: 1m30s
            drain_timeout: 0
        """
    )

    (rule,) = config.rules
    assert rule.source == "demo"
    assert rule.options == ModelSettings(
        ctx_size=1,
        parallel=2,
        gpu_layers="all",
        threads=3,
        kv_type="f16",
        flash_attn="on",
        draft_model="/etc/llamasup/d.gguf",
        mmproj="/etc/p.gguf",
        profile="throughput",
        loras=("/home/ann/a.gguf", "/b.gguf"),
        devices=("CUDA0",),
        extra=("--seed", "42", "--no-mmap"),
        check_memory=False,
        warm_up=False,
        ttl_s=float("inf"),
        pin=True,
        preload=True,
        replicas=2,
        keep_slots=True,
        max_concurrent=4,
        max_queued=0,
        wait_timeout_s=90.0,
        drain_timeout_s=0.0,
    )


def test_other_sections_are_read() -> None:
    config = config_of(
        """
        listen: [0.0.0.0:80, "[::1]:80", run/x.sock]
        runtime: ./build/llama-server
        models_dir: [a, /b]
        caches: [huggingface, llama.cpp]
        memory: {ram: 12GiB}
        max_loaded: 3
        default_model: org/repo:Q4_K_M
        swap_after: 500ms
        groups: {large: [x, "big*"]}
        auth: {insecure_no_auth: true}
        http:
          allow_hosts: LLM.example.net
          allow_origins: [https://Chat.example.net:443]
          remote_media: [CDN.example.net, "10.0.0.5:8000"]
          tls_cert:
          access_log: "-"
          request_timeout: 0
          slow_request: 30
          stream_keepalive: true
        downloads: {on_demand: true, endpoint: https://hub.example.net/, token_file: t, parallel: 8}
        slots: {keep: true, disk: 2GiB}
        watch: true
        """.replace("          tls_cert:\n", "")
    )

    assert config.listen[1:] == (TcpAddress("::1", 80), UnixAddress("/etc/llamasup/run/x.sock"))
    assert config.hosts == ("0.0.0.0", "::1", "/etc/llamasup/run/x.sock")
    assert config.port == 80
    assert config.runtime.path == "/etc/llamasup/build/llama-server"
    assert config.models_dir == (Path("/etc/llamasup/a"), Path("/b"))
    assert config.caches == ("huggingface", "llama.cpp")
    assert config.memory.ram == Size(bytes=12 << 30)
    assert (config.max_loaded, config.default_model, config.swap_after_s) == (3, "org/repo:Q4_K_M", 0.5)
    assert config.groups == {"large": ("x", "big*")}
    assert config.http.allow_hosts == ("llm.example.net",)
    assert config.http.allow_origins == ("https://chat.example.net",)
    assert config.http.remote_media == ("cdn.example.net", "10.0.0.5:8000")
    assert config.http.access_log == Path("-")
    assert (config.http.request_timeout_s, config.http.slow_request_s) == (None, 30.0)
    assert config.of(DOWNLOADS).endpoint == "https://hub.example.net"
    assert config.of(DOWNLOADS).token_file == Path("/etc/llamasup/t")
    assert config.slots.disk == Size(bytes=2 << 30)
    assert config.watch


def test_runtime_may_be_a_program_name() -> None:
    assert config_of("{models_dir: m, runtime: llama-server}").runtime.path == "llama-server"
    assert config_of("{models_dir: m, runtime: embedded}").runtime.path == "embedded"


def test_runtime_may_be_a_section_that_is_watched() -> None:
    config = config_of("{models_dir: m, runtime: {path: ./current/llama-server, watch: true}}")
    assert config.runtime == RuntimeChoice(path="/etc/llamasup/current/llama-server", watch=True)


def test_port_is_0_if_listen_has_only_sockets() -> None:
    assert config_of("{models_dir: m, listen: /run/x.sock}").port == 0


def test_sections_with_only_comments_have_defaults() -> None:
    config = config_of("models_dir: m\nmodels:\n#  a: {}\nmemory:\ncaches:\ngroups:\n")

    assert structs.replace(config, lines={}) == structs.replace(config_of("models_dir: m\n"), lines={})


def test_key_decides_the_type_of_its_value() -> None:
    config = config_of(
        """
        models:
          1e3: {path: 2026-01-01, aliases: [no, 080, 0x1f, "null"]}
          on: {path: off}
        default_model: 1e3
        """
    )

    assert list(config.models) == ["1e3", "on"]
    assert config.models["1e3"].aliases == ("no", "080", "0x1f", "null")
    assert config.models["on"].source == "/etc/llamasup/off"
    assert config.default_model == "1e3"


def test_rules_keep_the_order_of_the_file() -> None:
    config = config_of(
        """
        models_dir: m
        models:
          "*": {ttl: 1m}
          qwen: {ctx_size: 5}
          "q?en*": {ttl: 2m}
        """
    )

    assert [(rule.name, rule.is_pattern) for rule in config.rules] == [
        ("*", True),
        ("qwen", False),
        ("q?en*", True),
    ]


def test_thousand_models_are_read() -> None:
    config = config_of("models:\n" + "".join(f"  m{n}: {{path: m{n}.gguf, ttl: 1m}}\n" for n in range(1000)))

    assert len(config.rules) == 1000


def test_error_for_a_missing_config_has_a_remedy(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigInvalid, match=why) as caught:
            load(path, {})
        assert "llamasup config init" in caught.value.remedy


def test_byte_order_mark_and_windows_line_ends_are_accepted() -> None:
    assert config_of("\ufeffmodels_dir: m\r\nmax_loaded: 2\r\n").max_loaded == 2


# --- the environment ---------------------------------------------------------------------------------


def test_variables_are_replaced_in_all_kinds_of_values() -> None:
    config = config_of(
        """
        listen: 127.0.0.1:${PORT}
        models_dir: ["${MODELS}/a", "${NONE:-~/models}"]
        max_loaded: ${MANY}
        watch: "${WATCH}"
        swap_after: ${EMPTY:-7s}
        defaults: {extra: [--alias, "$${MODELS}", "$5"]}
        """,
        PORT="99",
        MODELS="/m",
        MANY="2",
        WATCH="true",
        EMPTY="",
    )

    assert config.port == 99
    assert config.models_dir == (Path("/m/a"), Path("/home/ann/models"))
    assert (config.max_loaded, config.watch, config.swap_after_s) == (2, True, 7.0)
    assert config.defaults.extra == ("--alias", "${MODELS}", "$5")


def test_values_of_variables_are_not_expanded_again() -> None:
    config = config_of('{models_dir: m, defaults: {extra: ["${A}"]}}', A="${B}", B="b")

    assert config.defaults.extra == ("${B}",)


# --- times and sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("0", 0),
    ],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert read_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "1:30",
        "30m1h",
        "1h1h",
        "10 m",
        "m",
        "inf",
        "nan",
        "1e3",
        "10min",
        "9999999h",
        "٣s",
        "1.5.5s",
    ],
)
def test_invalid_times_are_refused(text: str) -> None:
    assert read_duration(text) is None


@pytest.mark.parametrize("text", ["0s", "0.5s", "5s", "1m30s", "1h30m", "1d", "1d2h3m4s"])
def test_written_times_are_read_back(text: str) -> None:
    seconds = read_duration(text)

    assert seconds is not None
    assert duration_text(seconds) == text
    assert duration_text(float("inf")) == "never"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", Size(bytes=12 << 30)),
        ("800MB", Size(bytes=800_000_000)),
        ("1.5 GiB", Size(bytes=3 << 29)),
        ("1%", Size(percent=1)),
        ("100%", Size(percent=100)),
    ],
)
def test_sizes_are_read(text: str, size: Size) -> None:
    assert read_size(text) == (size, "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0%", "it is outside 1% to 100%"),
        ("101%", "it is outside 1% to 100%"),
        ("-1GiB", "it is negative"),
        ("-5%", "it is negative"),
        ("12", "the unit is missing"),
        ("12G", "unknown unit 'G', use KiB, MiB, GiB, TiB, kB, KB, MB, GB, TB"),
        ("0GiB", "it is less than a byte"),
        ("much", ""),
        ("", ""),
    ],
)
def test_invalid_sizes_are_refused_with_the_reason(text: str, why: str) -> None:
    assert read_size(text) == (None, why)


def test_size_is_at_most_the_total() -> None:
    assert Size(percent=80).of(1000) == 800
    assert Size(bytes=600).of(1000) == 600
    assert Size(bytes=6000).of(1000) == 1000


def test_written_sizes_are_read_back() -> None:
    for text in ("12GiB", "512MiB", "80%", "1GB", "2.5%"):
        size, _ = read_size(text)
        assert str(size) == text


def test_empty_config_has_defaults() -> None:
    config = Config()

    assert config.hosts == ("127.0.0.1",)
    assert config.swap_after_s == 5.0
    assert config.default_options == ModelSettings()


def test_keep_slots_of_a_model_overrides_slots_keep() -> None:
    config = config_of("slots: {keep: true}\nmodels:\n  shy: {path: shy.gguf, keep_slots: false}\n")
    assert config.default_options.keep_slots is True
    (shy,) = config.rules
    assert shy.options.keep_slots is False
    alone = config_of("models_dir: m\ndefaults: {keep_slots: false}\nslots: {keep: true}\n")
    assert alone.default_options.keep_slots is False


def test_value_of_a_key_is_found_by_its_name() -> None:
    config = Config(max_loaded=2, features={"usage": "counted"})
    assert [config.value(name) for name in ("max_loaded", "usage", "unknown")] == [2, "counted", None]
