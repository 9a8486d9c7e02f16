"""The arguments of a model: accepted, or refused with all their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import llamasup
from llamasup.api.inputs import ConfigInputs, config_of, entry_of, name_of, successor
from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import ConfigIssues
from llamasup.core.settings.model import ModelEntry


def entry_with(**options: Any) -> ModelEntry:
    return entry_of("demo", options)


def refused(**options: Any) -> str:
    with pytest.raises(llamasup.UsageInvalid) as caught:
        entry_with(**options)
    assert caught.value.remedy
    return "\n".join((caught.value.message, *caught.value.details))


def test_every_option_is_accepted(tmp_path: Path) -> None:
    arguments: llamasup.ModelArguments = {
        "ctx_size": 4096,
        "parallel": 2,
        "gpu_layers": "all",
        "threads": 3,
        "kv_type": "q8_0",
        "flash_attn": "on",
        "draft_model": tmp_path / "draft.gguf",
        "mmproj": str(tmp_path / "mmproj.gguf"),
        "profile": "latency",
        "loras": [tmp_path / "a.gguf"],
        "devices": ("CUDA0",),
        "rpc": ["10.0.0.2:50052"],
        "rpc_ca": tmp_path / "ca.pem",
        "rpc_cert": "/etc/llamasup/cert.pem",
        "rpc_key": tmp_path / "key.pem",
        "extra": ["--jinja", "--top-k", "3"],
        "nice": 5,
        "check_memory": False,
        "warm_up": False,
        "ttl_s": 600,
        "pin": True,
        "preload": False,
        "replicas": 2,
        "keep_slots": True,
        "max_concurrent": 1,
        "max_queued": 0,
        "wait_timeout_s": 0.5,
        "continue_streams": True,
        "repair": "tools",
        "drain_timeout_s": 3,
        "aliases": "other",
    }
    assert arguments.keys() == llamasup.ModelArguments.__annotations__.keys()
    assert entry_of("demo", arguments) == ModelEntry(
        path="demo",
        ctx_size=4096,
        parallel=2,
        gpu_layers="all",
        threads=3,
        kv_type="q8_0",
        flash_attn="on",
        draft_model=f"{tmp_path}/draft.gguf",
        mmproj=f"{tmp_path}/mmproj.gguf",
        profile="latency",
        loras=(f"{tmp_path}/a.gguf",),
        devices=("CUDA0",),
        rpc=("10.0.0.2:50052",),
        rpc_ca=f"{tmp_path}/ca.pem",
        rpc_cert="/etc/llamasup/cert.pem",
        rpc_key=f"{tmp_path}/key.pem",
        extra=("--jinja", "--top-k", "3"),
        nice=5,
        check_memory=False,
        warm_up=False,
        ttl_s=600.0,
        pin=True,
        preload=False,
        replicas=2,
        keep_slots=True,
        max_concurrent=1,
        max_queued=0,
        wait_timeout_s=0.5,
        continue_streams=True,
        repair="tools",
        drain_timeout_s=3.0,
        aliases=("other",),
    )


def test_none_means_unset_and_infinity_means_never() -> None:
    assert entry_with(ctx_size=None, ttl_s=float("inf"), gpu_layers=12) == ModelEntry(
        path="demo", ttl_s=float("inf"), gpu_layers=12
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ctxsize": 1}, "ctxsize: unknown option (did you mean ctx_size?)."),
        ({"ttl": 600}, "ttl: unknown option (did you mean ttl_s?)."),
        ({"path": "x"}, "path: unknown option (valid options: ctx_size, parallel, gpu_layers,"),
        ({"where": "x"}, "where: unknown option"),
        ({"ctx_size": "4096"}, "ctx_size: invalid value '4096'; expected a whole number, 1 or more."),
        ({"ctx_size": 0}, "ctx_size: invalid value 0; expected a whole number, 1 or more."),
        ({"ctx_size": True}, "ctx_size: invalid value True; expected a whole number"),
        ({"ctx_size": 1e3}, "ctx_size: invalid value 1000.0; expected a whole number"),
        ({"ctx_size": 1 << 80}, "expected a whole number, 1 or more."),
        ({"parallel": 5000}, "parallel: invalid value 5000; expected a whole number from 1 to 1024."),
        (
            {"gpu_layers": "some"},
            "gpu_layers: invalid value 'some'; expected a whole number, 0 or more, or auto or all.",
        ),
        ({"gpu_layers": 1.5}, "gpu_layers: invalid value 1.5; expected"),
        ({"flash_attn": True}, "flash_attn: invalid value True; expected on, off or auto."),
        ({"kv_type": "Q8 0"}, "kv_type: invalid value 'Q8 0'; expected a KV cache type such as f16"),
        ({"pin": 1}, "pin: invalid value 1; expected True or False."),
        ({"ttl_s": -1}, "ttl_s: invalid value -1; expected seconds, 0 or more, or inf for never."),
        ({"ttl_s": float("nan")}, "ttl_s: invalid value nan; expected seconds"),
        ({"ttl_s": "10m"}, "ttl_s: invalid value '10m'; expected seconds"),
        ({"wait_timeout_s": float("inf")}, "wait_timeout_s: invalid value inf; expected seconds, 0 or more."),
        ({"extra": "--jinja"}, "extra: invalid value '--jinja'; expected a list, each text."),
        ({"extra": {"--jinja": 1}}, "expected a list, each text."),
        ({"extra": [1]}, "extra: invalid value [1]; expected a list"),
        ({"loras": [3]}, "loras: invalid value [3]; expected a list, each the path of"),
        ({"loras": 3}, "loras: invalid value 3; expected a list, each the path of"),
        ({"rpc": ["tls://w:7", "tls://W:7"]}, "rpc: invalid value"),
        ({"rpc": ["tls://w:7", "tls://W:7"]}, "('tls://w:7' occurs twice); expected a list, each HOST:PORT"),
        ({"draft_model": ""}, "draft_model: invalid value ''; expected the path of a .gguf file."),
        (
            {"draft_model": "~nobody-has-this-name/x"},
            "(Could not determine",
        ),
        (
            {"aliases": [" b"]},
            "aliases: invalid value [' b'] (it begins or ends with a space); expected a list, each a name",
        ),
    ],
)
def test_invalid_values_are_refused_with_the_valid_ones(options: dict[str, Any], says: str) -> None:
    assert says in refused(**options)


def test_all_invalid_options_are_reported_at_once() -> None:
    assert refused(ctx_size=0, ttl=3, pin="yes").splitlines() == [
        "3 invalid options:",
        "ctx_size: invalid value 0; expected a whole number, 1 or more",
        "ttl: unknown option (did you mean ttl_s?)",
        "pin: invalid value 'yes'; expected True or False",
    ]


def test_model_is_a_file_a_repository_a_url_or_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry_of("demo", {}).source == "demo"
    assert entry_of("org/repo:Q4_K_M", {}).repo == "org/repo:Q4_K_M"
    assert entry_of("https://example.net/a.gguf", {}).url == "https://example.net/a.gguf"
    assert entry_of("a.gguf", {}).path == f"{tmp_path}/a.gguf"
    assert entry_of(Path("org/repo"), {}).path == f"{tmp_path}/org/repo"
    (tmp_path / "demo").touch()
    assert entry_of("demo", {}).path == f"{tmp_path}/demo"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/Qwen 2.gguf", "Qwen-2"),
        ("org/repo:Q4_K_M", "repo:Q4_K_M"),
        ("demo", "demo"),
        ("/m/日本.gguf", "model"),
    ],
)
def test_model_without_a_name_is_named_after_its_file(path: str, name: str) -> None:
    assert name_of(path) == name


def test_options_of_a_name_survive_a_new_file_and_those_of_a_file_do_not() -> None:
    before = entry_with(ctx_size=512, extra=["--jinja"], ttl_s=60, aliases=["b"], preload=True, max_queued=3)

    def after(**options: Any) -> ModelEntry:
        return successor(entry_with(**options), before, options)

    assert after(parallel=1, ttl_s=5, max_queued=0, pin=None) == entry_with(
        parallel=1, ttl_s=5, aliases=["b"], preload=True, max_queued=0
    )
    assert after(aliases=[]) == entry_with(ttl_s=60, preload=True, max_queued=3)
    assert successor(entry_with(parallel=1), None, {"parallel": 1}) == entry_with(parallel=1)


def test_config_is_read_each_time_and_arguments_override_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text('models: {a: {path: a.gguf}, b: {path: b.gguf, ctx_size: "${SIZE}"}}\n')
    inputs = ConfigInputs(file, (tmp_path,), {"SIZE": "512"}, {"a": entry_with(pin=True)})
    copy = inputs.copy()
    assert inputs().models["a"] == entry_with(pin=True)
    assert inputs().models["b"].ctx_size == 512
    assert inputs().models_dir == (tmp_path,)
    file.write_text("models: {c: {path: c.gguf}}\n")
    inputs.models["d"] = entry_with()
    assert list(inputs().models) == ["c", "a", "d"]
    assert list(copy().models) == ["c", "a"]


def refused_to_serve(*arguments: Any, **options: Any) -> llamasup.LlamasupError:
    with pytest.raises(llamasup.UsageInvalid) as caught:
        llamasup.serve(*arguments, **options)
    return caught.value


def test_unservable_models_are_refused_before_the_start() -> None:
    assert refused_to_serve().message == "No models to serve."
    assert refused_to_serve(ctx_size=4, config=Config()).message == "ctx_size was given without a model."
    assert refused_to_serve(name="x", models_dir="/m").message == "name was given without a model."
    assert refused_to_serve("").message == "'' is not a model."
    assert refused_to_serve("a\0b").message == "'a\\x00b' is not a model."
    assert refused_to_serve("demo", port="80").message == "port='80' is not a valid port."
    assert refused_to_serve("demo", port=True).message == "port=True is not a valid port."
    assert refused_to_serve("demo", colour="red").message.startswith("colour: unknown option")
    assert "there is no user" in refused_to_serve(models_dir="~nobody-has-this-name").message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": 5}, "model=5: expected a string or a Path."),
        ({"model": "demo", "name": 5}, "name=5: expected a string."),
        ({"model": "demo", "host": None}, "host=None: expected a string."),
        ({"model": "demo", "host": " , "}, "host=' , ' is empty."),
        ({"model": "demo", "runtime": 5}, "runtime=5: expected a string or a Path."),
        ({"model": "demo", "api_key": 5}, "The api_key is invalid (not shown)."),
        ({"model": "demo", "port": 70_000}, "port=70000 is not a valid port."),
        (
            {"model": "demo", "environ": ["A=1"]},
            "environ=['A=1']: expected a mapping, as os.environ is.",
        ),
        ({"models_dir": [5]}, "models_dir=5: expected a string or a Path."),
        ({"config": 5}, "config is a int; expected the path of a file, or a dict."),
        ({"config": {"models": {"a": {"path": object()}}}}, "The config has a value that a file cannot have"),
        ({"config": {"swap_after": float("nan")}}, "The config has a value that a file cannot have"),
        (
            {"config": Config(models=cast("Any", {"a": {"path": "demo"}}))},
            "Config: models['a'] is a dict that was not checked",
        ),
        (
            {"config": Config(memory=cast("Any", {"ram": "80%"}))},
            "Config: memory is a dict that was not checked.",
        ),
    ],
)
def test_argument_of_the_wrong_type_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    assert refused_to_serve(**arguments).message.startswith(says)


def test_config_dict_is_checked_like_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = {
        "memory": {"ram": "80%", "vram": None},
        "models": {"a": {"path": Path("a.gguf"), "ctx_size": "${SIZE}", "ttl": "10m", "aliases": ("é ",)}},
    }
    with pytest.raises(ConfigIssues) as caught:
        llamasup.serve(config=config, environ={"SIZE": "512"})
    (issue,) = caught.value.details
    assert issue.startswith("config: models.a.aliases[0]: invalid value 'é '")
    config["models"]["a"]["aliases"] = ()
    read = config_of(config, {"SIZE": "512"}, more_models=False)
    assert isinstance(read, Config)
    model = read.models["a"]
    assert (model.path, model.ctx_size, model.ttl_s) == (f"{tmp_path}/a.gguf", 512, 600.0)


def test_none_means_unset_for_preload() -> None:
    for options, is_preloaded in (({}, True), ({"preload": None}, True), ({"preload": False}, False)):
        serving = llamasup.serve("demo", **options)
        assert serving._given.models["demo"].preload is is_preloaded


@pytest.mark.parametrize("key", ["", "two words", "é", "line\n"])
def test_api_key_invalid_in_a_header_is_refused_and_not_shown(key: str) -> None:
    error = refused_to_serve("demo", api_key=key)
    assert error.message == "The api_key is invalid (not shown)."
