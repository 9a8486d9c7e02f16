"""Options are declared once: every command parses them alike, and a service formats them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from llamasup.cli.app import COMMANDS, app
from llamasup.cli.foreground import OutputOptions
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import Option, takes_groups
from llamasup.cli.options.model import SETTINGS, WithExtra
from llamasup.core.settings.model import Settings
from llamasup.core.settings.units import Size
from llamasup.features.wrap.options import WrapOptions
from llamasup.service.options import RunOptions
from tests.e2e.driver import run_to_end
from tests.kit.extent import examples

_text = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1).filter(
    lambda text: not text.startswith("-")
)
_count = st.none() | st.integers(0, 1 << 20)

any_settings = st.builds(
    Settings,
    alias=st.none() | _text,
    ctx_size=_count,
    parallel=_count,
    gpu_layers=st.none() | st.sampled_from(["auto", "all"]) | st.integers(0, 99),
    threads=_count,
    kv_type=st.none() | _text,
    flash_attn=st.sampled_from([None, "on", "off", "auto"]),
    draft_model=st.none() | _text,
    mmproj=st.none() | _text,
    profile=st.sampled_from([None, "latency", "throughput", "memory", "plain"]),
    check_memory=st.booleans(),
    extra=st.lists(_text | st.sampled_from(["--temp", "-fa"])).map(tuple),
)
_seconds = st.integers(0, 10_000).map(lambda tenths: tenths / 10)
_limit = st.none() | st.integers(1, 10_000).map(lambda tenths: tenths / 10)
_file = st.none() | st.sampled_from(["/a", "b c", "é/d"]).map(Path)
any_given = st.fixed_dictionaries(
    {
        "host": st.sampled_from(["127.0.0.1", "::1", "/run/a b.sock"]),
        "port": st.integers(0, 65535),
        "tls_cert": _file,
        "tls_key": _file,
        "api_key_file": _file,
        "no_ui": st.booleans(),
        "ollama": st.sampled_from([None, "127.0.0.1:11434", "[::1]:80", "/run/a.sock"]),
        "insecure_no_auth": st.booleans(),
        "hosts": st.lists(st.sampled_from(["a.example", "10.0.0.1", "::2"])).map(tuple),
        "origins": st.lists(st.sampled_from(["https://a.example", "http://localhost:3000"])).map(tuple),
        "trusted_proxies": st.lists(st.sampled_from(["10.0.0.1/32", "fd00::/8", "unix"])).map(tuple),
        "remote_media": st.lists(st.sampled_from(["a.example", "[::2]:80", "any"])).map(tuple),
        "max_body": st.none() | st.sampled_from([Size(bytes=1 << 30), Size(bytes=5 << 20)]),
        "max_concurrent": st.none() | st.integers(1, 99),
        "max_queued": st.integers(0, 999),
        "continue_streams": st.booleans(),
        "repair": st.sampled_from([None, "off", "tools", "json", "both"]),
        "wait_timeout_s": _seconds,
        "request_timeout_s": _limit,
        "stream_keepalive": st.booleans(),
        "warm_up": st.booleans(),
        "drain_timeout_s": _seconds,
        "stop_timeout_s": _seconds,
        "no_usage": st.booleans(),
        "access_log": _file | st.just(Path("-")),
        "slow_request_s": _limit,
        "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
        "log_format": st.sampled_from(["text", "json"]),
    }
)


def parsed(arguments: list[str]) -> tuple[str, Settings, dict[str, Any], str | None]:
    """The values that the real options parse from a command line."""
    reader = typer.Typer()
    seen: list[tuple[str, Settings, dict[str, Any], str | None]] = []

    @reader.command(cls=WithExtra)
    @takes_groups
    def run(
        ctx: typer.Context,
        model: str,
        listening: o.Listening,
        settings: o.ModelSettings,
        serving: o.Serving,
        logging: o.Logging,
        runtime: o.RuntimeOption = None,
    ) -> None:
        seen.append((model, settings, {**listening, **serving, **logging}, runtime))

    result = CliRunner().invoke(reader, arguments[1:])
    assert result.exit_code == 0, result.output
    (found,) = seen
    return found


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(any_settings, any_given)
def test_formatted_arguments_are_parsed_to_the_same_values(chosen: Settings, given: dict[str, Any]) -> None:
    arguments = o.run_arguments("/srv/m.gguf", chosen, given, "embedded")
    assert parsed(arguments) == ("/srv/m.gguf", chosen, given, "embedded")


def test_defaults_are_not_formatted_except_those_of_the_unit() -> None:
    _, chosen, given, _ = parsed(["run", "m.gguf", "--ctx-size", "512", "--no-warmup", "--", "--temp", "0"])
    assert o.run_arguments("m.gguf", chosen, given, "embedded") == [
        *("run", "m.gguf", "--ctx-size", "512", "--host", "127.0.0.1", "--port", "8080", "--no-warmup"),
        *("--drain-timeout", "30", "--stop-timeout", "10", "--runtime", "embedded", "--", "--temp", "0"),
    ]


_OF_RUN = (*o.LISTENING.options, *o.SERVING.options, *o.FOREGROUND.options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (list(_OF_RUN), RunOptions),
        ([*o.SERVING.options, *o.FOREGROUND.options], WrapOptions),
        ([*o.PARENT_PROGRAM.options, *o.LOGGING.options], OutputOptions),
        (list(SETTINGS.options), Settings),
    ],
)
def test_option_has_the_default_of_its_field(options: list[Option], kind: Any) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for option in options:
        field = fields[option.field]
        if field.default is not msgspec.NODEFAULT:
            assert option.default == field.default, option.field
        elif field.default_factory is not msgspec.NODEFAULT:
            assert option.default == field.default_factory(), option.field


def test_every_setting_of_a_model_has_an_option() -> None:
    of_many_models = {"devices", "loras", "ttl_s", "pin", "preload", "replicas"}
    found_next_to_models = {"adapters"}
    options = {option.field for option in (*SETTINGS.options, *o.SERVING.options)}
    assert {*Settings.__struct_fields__} - options == of_many_models | found_next_to_models


_HERE = {entry.name for section in COMMANDS.values() for entry in section}
_OF_A_SERVICE = (["run"], ["service", "print"], ["service", "install"], ["wrap"])


@pytest.mark.parametrize("command", [words for words in _OF_A_SERVICE if words[0] in _HERE])
def test_every_command_of_a_service_has_the_serving_options(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], obj=0.0).output
    for option in o.SERVING.options:
        arguments = option.to_arguments(_another(option))
        (flag,) = {argument for argument in arguments if argument.startswith("--")}
        assert f" {flag} " in shown.replace("\n", " \n"), flag


def _another(option: Option) -> Any:
    """A value other than the default."""
    match option.default:
        case bool():
            return not option.default
        case tuple():
            return ("a",)
        case int() | float():
            return option.default + 1
        case _:
            return 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allow-origin", "*"], "'*' would let every web page"),
        (["--allow-host", "*"], "DNS rebinding"),
        (["--max-concurrent", "0"], "0 is less than 1"),
        (["--flash-attn", "maybe"], "'maybe' is not on, off or auto"),
        (["--repair", "all"], "'all' is not off, tools, json or both"),
        (["--gpu-layers", "most"], "'most' is not a number of layers, auto or all"),
        (["--request-timeout", "nan"], "'nan' is not a valid number of seconds"),
        (["--log-level", "loud"], "'loud' is not debug, info, warning or error"),
        (["--events", "xml"], "'xml' is not jsonl"),
    ],
)
def test_invalid_value_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["run", "demo", *arguments], obj=0.0, terminal_width=200)
    assert result.exit_code == 2
    assert message in result.output


def test_formatted_arguments_of_serve_are_parsed_to_the_same_values() -> None:
    reader = typer.Typer()
    seen: list[tuple[Path | None, dict[str, Any], str | None]] = []

    @reader.command()
    @takes_groups
    def serve(
        ctx: typer.Context,
        overrides: o.ConfigOverrides,
        logging: o.Logging,
        config: o.ConfigFile = None,
        watch: o.Watch = False,
        runtime: o.RuntimeOption = None,
    ) -> None:
        seen.append((config, {**overrides, **logging, "watch": watch}, runtime))

    nothing = {option.field: option.default for option in (*o.CONFIG_OVERRIDES.options, *o.LOGGING.options)}
    much = {
        **nothing,
        "models_dir": ("/a b", "/c"),
        "port": 0,
        "insecure_no_auth": True,
        "tls_key": Path("/k"),
        "token_file": Path("/t"),
        "log_format": "json",
    }
    for config, values in ((None, {**nothing, "watch": False}), (Path("/x y.yaml"), {**much, "watch": True})):
        arguments = o.serve_arguments(config, values, "embedded")
        result = CliRunner().invoke(reader, arguments[1:])
        assert result.exit_code == 0, result.output
        assert seen.pop() == (config, values, "embedded")


def test_number_above_the_limit_of_its_setting_is_refused() -> None:
    done = run_to_end("plan", "demo", "--nice", "20")
    assert done.returncode == 2
    assert "20 is more than 19." in done.stderr
