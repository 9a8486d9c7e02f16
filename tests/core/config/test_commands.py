"""``llamasup config``: output and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from llamasup.cli.commands.config import StarterFacts, check, init, schema, starter_text
from llamasup.core.config.config_keys import json_schema
from llamasup.core.config.issues import ConfigIssues
from llamasup.core.config.reading import Reading
from llamasup.core.supervision.events import Bus
from llamasup.core.system.storage.folders import models_folder
from llamasup.errors import RuntimeMissing
from llamasup.features import config_keys
from llamasup.service.config_check import environment_issues
from llamasup.service.config_source import ConfigSource
from llamasup.service.hosting import Service
from llamasup.service.serve import ServeOptions
from tests.core.config.reading import config_of
from tests.kit.configs import load, read, read_text
from tests.kit.fake_server import install
from tests.kit.models import tiny_decoder
from tests.kit.paths import ROOT


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without models, caches and a runtime."""
    for name in list(os.environ):
        if name.startswith(("LLAMASUP_", "XDG_", "HF_", "LLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLAMASUP_RUNTIME", str(tmp_path / "missing" / "llama-server"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(dedent(text))
    return path


def missing(path: Path, **environ: str) -> list[str]:
    reading, issues = read(path, {"HOME": str(path.parent), **environ})
    assert not issues
    return [each.in_file("c.yaml") for each in sorted(environment_issues(reading, environ))]


# --- check -------------------------------------------------------------------------------------------


def test_check_reports_a_valid_config(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "m").mkdir()
    path = written(home, "models_dir: m\nmodels: {a: {path: demo}, 'b*': {ttl: 1m}}\n")

    assert check(path, json=False) == 0

    output = capfd.readouterr()
    assert output.out == ""
    valid, unchecked = output.err.splitlines()
    assert valid == f"{path} is valid: 1 model, 1 rule, 1 folder."
    assert unchecked.startswith("The models were not checked: ")  # there is no runtime


def test_check_reports_all_errors_at_once(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(home, "max_loaded: no\nmodels:\n  a: {path: a.gguf}\n")

    assert check(path, json=False) == 78

    assert capfd.readouterr().err.splitlines() == [
        f"llamasup: {path} has 2 errors.",
        f"    {path}:1: max_loaded: invalid value 'no'; expected a whole number, 1 or more",
        f"    {path}:3: models.a.path: '{home}/a.gguf': No such file or directory",
    ]


def test_check_writes_json(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(home, "max_loaded: no\nmodels: {a: {path: demo}}\n")

    assert check(path, json=True) == 78
    assert json.loads(capfd.readouterr().out) == {
        "ok": False,
        "file": str(path),
        "mistakes": [
            {
                "line": 1,
                "key": "max_loaded",
                "message": "invalid value 'no'; expected a whole number, 1 or more",
            }
        ],
    }

    assert check(home / "none.yaml", json=True) == 78
    found = json.loads(capfd.readouterr().out)
    assert (found["ok"], found["mistakes"][0]["line"]) == (False, None)

    path.write_text("models: {a: {path: demo}}")
    assert check(path, json=True) == 0
    valid = {"ok": True, "file": str(path), "mistakes": []}
    assert json.loads(capfd.readouterr().out) == {**valid, "one_process": []}


def test_check_says_which_names_share_a_process(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = home / "c.yaml"
    path.write_text(
        "models: {a: {path: demo}, b: {path: demo, ctx_size: 512}, c: {path: demo, extra: [-cb]}}"
    )
    assert check(path) == 0
    assert "One process serves a and b, with the settings of all." in " ".join(capfd.readouterr().err.split())
    assert check(path, json=True) == 0
    assert json.loads(capfd.readouterr().out)["one_process"] == [["a", "b"]]


def test_check_uses_the_config_of_serve(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = home / ".config/llamasup/config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("models: {a: {path: demo}}")

    assert check(None, json=False) == 0
    assert str(own) in capfd.readouterr().err


def test_missing_files_and_folders_are_reported_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    path = written(
        tmp_path,
        """\
        models_dir: [none, file]
        models:
          a:
            path: a.gguf
            draft_model: d.gguf
            loras: [l.gguf, file]
          "b*": {mmproj: p.gguf}
        defaults: {mmproj: file}
        listen: none/x.sock
        http: {access_log: none/log}
        """,
    )

    assert missing(path) == [
        f"c.yaml:1: models_dir[0]: '{tmp_path}/none': No such file or directory",
        f"c.yaml:1: models_dir[1]: '{tmp_path}/file': Not a directory",
        f"c.yaml:4: models.a.path: '{tmp_path}/a.gguf': No such file or directory",
        f"c.yaml:5: models.a.draft_model: '{tmp_path}/d.gguf': No such file or directory",
        f"c.yaml:6: models.a.loras[0]: '{tmp_path}/l.gguf': No such file or directory",
        f"c.yaml:7: models.b*.mmproj: '{tmp_path}/p.gguf': No such file or directory",
        f"c.yaml:9: listen: '{tmp_path}/none': No such file or directory",
        f"c.yaml:10: http.access_log: '{tmp_path}/none': No such file or directory",
    ]


@pytest.fixture
def models(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models and a runtime."""
    monkeypatch.setenv("LLAMASUP_RUNTIME", str(install(home / "llama-server")))
    (home / "m").mkdir()
    for name in ("x", "y"):
        (home / f"m/{name}.gguf").write_bytes(tiny_decoder() + b"\0" * (name == "y"))
    return home


def test_check_and_serve_report_the_same_errors(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (models / "broken.gguf").write_bytes(tiny_decoder()[:2000])
    path = written(
        models,
        """\
        models:
          a: {path: m/x.gguf}
          b:
            path: m/y.gguf
            kv_type: q9_9
          c2.5: {path: broken.gguf}
          d:
            path: m/x.gguf
            extra: [--nonsense]
        """,
    )
    assert check(path, json=False) == 78

    said = capfd.readouterr().err
    assert f"{path} has 3 errors." in said
    assert f"{path}:5: models.b.kv_type: --kv-type 'q9_9' is not a KV cache type" in said
    assert f"{path}:6: models.c2.5.path: {models}/broken.gguf" in said
    assert f"{path}:9: models.d.extra: this llama-server" in said
    assert "has no --nonsense" in said

    with pytest.raises(ConfigIssues) as refused:
        Service(ServeOptions.of(lambda: load(path, os.environ), config_file=path, port=0), Bus())
    assert [(each.line, each.key) for each in refused.value.issues] == [
        (5, "models.b.kv_type"),
        (6, "models.c2.5.path"),
        (9, "models.d.extra"),
    ]


@pytest.mark.parametrize("flags", ["[--host, 0.0.0.0]", "[--nonsense]", "[--ctx-size]", "[word]"])
def test_invalid_flags_are_reported_in_all_sections(
    models: Path, capfd: pytest.CaptureFixture[str], flags: str
) -> None:
    """Also for models from a folder, and for models that are not downloaded yet."""
    path = written(
        models,
        f"""\
        models_dir: m
        defaults:
          ctx_size: 2048
          extra: {flags}
        models:
          "x*":
            extra: {flags}
          far:
            repo: org/repo
            extra: {flags}
          y:
            extra: [--metrics]
        """,
    )
    assert check(path, json=False) == 78

    said = capfd.readouterr().err
    assert f"{path} has 3 errors." in said
    for place in ("4: defaults.extra", "7: models.x*.extra", "10: models.far.extra"):
        assert f"{path}:{place}: " in said

    options = ServeOptions.of(lambda: load(path, os.environ), config_file=path, port=0)
    with pytest.raises(ConfigIssues) as at_start:
        Service(options, Bus())
    source = ConfigSource(options, os.environ)
    with pytest.raises(ConfigIssues) as at_reload:
        source.check(source.read(), {})
    for refused in (at_start.value, at_reload.value):
        assert [(each.line, each.key) for each in refused.issues] == [
            (4, "defaults.extra"),
            (7, "models.x*.extra"),
            (10, "models.far.extra"),
        ]
        for line in refused.details:
            assert line in said


def test_broken_model_from_a_variable_is_reported_by_the_variable(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (models / "not-to-be-seen.gguf").write_bytes(tiny_decoder()[:2000])
    monkeypatch.setenv("S", "not-to-be-seen")
    path = written(models, "models: {a: {path: '${S}.gguf'}}\n")
    assert check(path, json=False) == 78

    said = capfd.readouterr().err
    assert "not-to-be-seen" not in said
    assert f"{path}:1: models.a.path: '${{S}}.gguf': " in said


def test_missing_device_is_refused_at_the_start(models: Path) -> None:
    path = written(models, "models: {a: {path: m/x.gguf, devices: CUDA9}}\n")
    with pytest.raises(ConfigIssues) as refused:
        Service(ServeOptions.of(lambda: load(path, os.environ), config_file=path, port=0), Bus())
    assert [each.key for each in refused.value.issues] == ["models.a.devices"]
    assert "'CUDA9' does not exist" in refused.value.details[0]


def test_unknown_names_are_reported(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(
        models,
        """\
        models_dir: m
        default_model: nosuch
        models: {xx: {aliases: gpt}}
        groups: {g: [zz, x, "q*"]}
        """,
    )
    assert check(path, json=True) == 78

    found = [(each["line"], each["key"]) for each in json.loads(capfd.readouterr().out)["mistakes"]]
    assert found == [(2, "default_model"), (3, "models.xx"), (4, "groups.g[0]"), (4, "groups.g[2]")]


def test_two_pinned_models_in_a_group_are_refused(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(
        models,
        """\
        models_dir: m
        groups: {g: [x, y]}
        models:
          x: {pin: true}
          y: {pin: true}
        """,
    )
    assert check(path, json=False) == 78
    assert f"{path}:5: models.y: it is pinned, and so is 'x'; both are in group 'g'" in capfd.readouterr().err

    path.write_text(path.read_text().replace("y: {pin: true}", "y: {pin: false}"))
    assert check(path, json=False) == 0


def test_literal_values_are_not_checked_as_files(tmp_path: Path) -> None:
    path = written(
        tmp_path, "models: {a: {path: demo, mmproj: none, loras: auto}}\ndefaults: {mmproj: none}\n"
    )
    assert missing(path) == []


def test_key_in_place_of_its_file_is_not_shown(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(
        home,
        """\
        models: {a: {path: demo}}
        auth: {api_key_file: sk-SECRET}
        """,
    )
    assert check(path, json=False) == 78

    said = capfd.readouterr().err
    assert "SECRET" not in said
    assert f"{path}:2: auth.api_key_file: The API key file of auth.api_key_file cannot be read: " in said


def test_values_of_variables_are_not_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("S", "not-to-be-seen")
    path = written(
        home,
        """\
        models_dir: ${S}/m
        models: {a: {path: "${S}.gguf"}}
        listen: /${S}/x.sock
        runtime: ./${S}-server
        http: {access_log: "${S}/log"}
        """,
    )
    assert check(path, json=False) == 78

    said = capfd.readouterr().err
    assert "not-to-be-seen" not in said
    assert f"{path}:1: models_dir: '${{S}}/m': No such file or directory" in said
    assert f"{path}:2: models.a.path: '${{S}}.gguf': No such file or directory" in said
    assert f"{path}:3: listen: '/${{S}}/x.sock/..': No such file or directory" in said
    assert f"{path}:4: runtime: './${{S}}-server' is not an executable" in said


def test_pipe_as_a_model_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    assert missing(written(tmp_path, "models: {a: {path: m.gguf}}\n")) == []


def test_public_address_needs_a_key(tmp_path: Path) -> None:
    path = written(tmp_path, "models: {a: {path: demo}}\nlisten: 0.0.0.0:80\n")
    assert missing(path) == [
        "c.yaml:2: listen: '0.0.0.0' can be reached from other machines, and no API key is set; "
        "set auth.api_key_file, or auth.insecure_no_auth to allow access without a key"
    ]
    assert missing(path, LLAMASUP_API_KEY="k") == []

    keys = tmp_path / "keys"
    keys.write_text("k\n")
    keys.chmod(0o600)
    with path.open("a") as file:
        file.write("auth: {api_key_file: keys}\n")
    assert missing(path) == []

    path.write_text("models: {a: {path: demo}}\nlisten: 0.0.0.0:80\nauth: {insecure_no_auth: true}\n")
    assert missing(path) == []


def test_key_file_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path, "models: {a: {path: demo}}\nauth: {api_key_file: keys}\n")
    assert "auth.api_key_file: The API key file" in missing(path)[0]

    (tmp_path / "keys").write_text("k rpm=none\n")
    (found,) = missing(path)
    assert found.startswith("c.yaml:2: auth.api_key_file: The API key file")
    assert "line 1" in found


def test_certificates_are_checked(tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).write_text("no PEM")
    path = written(tmp_path, "models: {a: {path: demo}}\nhttp: {tls_cert: cert, tls_key: key}\n")

    assert missing(path)[0].startswith("c.yaml:2: http.tls_cert: ")

    path.write_text("models: {a: {path: demo}}\nhttp: {tls_cert: '${S}', tls_key: '${S}/k'}\n")
    assert "the certificate '${S}' and the key '${S}/k'" in missing(path, S="not-to-be-seen")[0]


def test_missing_runtime_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path, "models: {a: {path: demo}}\nruntime: ./none\n")

    assert missing(path) == [
        f"c.yaml:2: runtime: '{tmp_path}/none' is not an executable program; give another one, or auto"
    ]


def _reading(text: str) -> Reading:
    reading, issues = read_text(text.encode(), "c.yaml", Path("/"), {})
    assert not issues
    return reading


def test_unknown_devices_are_reported() -> None:
    reading = _reading((ROOT / "configs" / "two-gpus.yaml").read_text())

    assert environment_issues(reading, {}, devices_of=lambda *_: ["CUDA0", "CUDA1"]) == ()
    found = [each.what for each in environment_issues(reading, {}, devices_of=lambda *_: ["CUDA0"])]
    assert found == ["'CUDA1' does not exist; the runtime has CUDA0"] * 2
    found = [each.what for each in environment_issues(reading, {}, devices_of=lambda *_: [])]
    assert found[0] == "'CUDA0' does not exist; the runtime has no devices"


def test_failed_list_of_devices_is_reported_once() -> None:
    def none(*_: Any) -> list[str]:
        raise RuntimeMissing("No llama-server was found.")

    reading = _reading((ROOT / "configs" / "two-gpus.yaml").read_text())

    assert [each.what for each in environment_issues(reading, {}, devices_of=none)] == [
        "cannot list the devices: No llama-server was found."
    ]


def test_devices_are_listed_only_if_a_model_names_one() -> None:
    def never(*_: Any) -> list[str]:
        raise AssertionError

    reading = _reading("models: {a: {path: demo, devices: none}}")

    assert environment_issues(reading, {}, devices_of=never) == ()


# --- init --------------------------------------------------------------------------------------------


def test_init_writes_a_config_that_check_accepts(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert init(None, force=False) == 0
    path = home / ".config/llamasup/config.yaml"
    assert f"Wrote {path}" in capfd.readouterr().err

    assert check(None, json=False) == 0
    assert capfd.readouterr().err.startswith(f"{path} is valid: 1 model.\n")


def test_init_finds_models_caches_and_keys(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "models").mkdir()
    (home / ".cache/llama.cpp").mkdir(parents=True)
    keys = home / ".config/llamasup/keys"
    keys.parent.mkdir(parents=True)
    keys.write_text("k\n")
    keys.chmod(0o600)

    assert init(Path("-"), force=False) == 0

    text = capfd.readouterr().out
    config = config_of(text, HOME=str(home))
    assert config.models_dir[0] == home / "models"
    assert config.caches == ("llama.cpp",)
    assert config.auth.api_key_file == keys


def test_init_names_the_folder_of_pull_if_it_exists(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models_folder().mkdir(parents=True)
    (home / "models").mkdir(exist_ok=True)
    assert init(Path("-"), force=False) == 0
    folders = config_of(capfd.readouterr().out, HOME=str(home)).models_dir
    assert list(folders[:2]) == [models_folder(), home / "models"]


def test_init_overwrites_only_with_force(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = home / "x" / "c.yaml"
    assert init(path, force=False) == 0
    path.write_text("mine")

    assert init(path, force=False) == 2
    assert path.read_text() == "mine"
    assert "--force" in capfd.readouterr().err

    assert init(path, force=True) == 0
    assert check(path, json=False) == 0


@pytest.mark.parametrize("output", ["/proc/none/c.yaml", "/", "~nobody-at-all/c.yaml"])
def test_init_reports_an_unwritable_path(home: Path, output: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert init(Path(output), force=False) in (2, 71)

    assert "Traceback" not in (said := capfd.readouterr().err)
    assert output.rstrip("/") in said
    assert "--output" in said


_FOUND = StarterFacts(
    ram_bytes=64 << 30,
    cores=16,
    devices=[("CUDA0", "NVIDIA GeForce RTX 4090"), ("CUDA1", "NVIDIA GeForce RTX 3060")],
    runtime="/usr/bin/llama-server (b11434)",
    models_dirs=["~/models", "/srv/models: our own"],
    caches=["huggingface"],
    key_file="/home/ann/${x}/keys #1",
)


def test_starter_quotes_unusual_names() -> None:
    text = starter_text(_FOUND)
    config = config_of(text)

    assert [str(each) for each in config.models_dir] == ["/home/ann/models", "/srv/models: our own"]
    assert str(config.auth.api_key_file) == "/home/ann/${x}/keys #1"
    assert str(config.memory.vram) == "90%"
    assert "64 GiB of memory" in text
    assert "CUDA1 (NVIDIA GeForce RTX 3060)" in text
    assert "auto found /usr/bin/llama-server (b11434)" in text


def test_commented_lines_of_the_starter_are_valid() -> None:
    text = starter_text(StarterFacts(ram_bytes=8 << 30, cores=4))
    config_of(text)
    config = config_of(re.sub(r"^#(?=  |[^ ])", "", text, flags=re.MULTILINE))

    assert "qwen" in config.models
    assert config.caches == ("huggingface", "llama.cpp")
    assert config.auth.api_key_file is not None
    assert config.defaults.ctx_size == 8192


# --- schema, and imports -----------------------------------------------------------------------------


def test_schema_prints_the_schema(capfd: pytest.CaptureFixture[str]) -> None:
    assert schema() == 0
    assert json.loads(capfd.readouterr().out) == json_schema(config_keys())


def test_other_commands_do_not_import_yaml() -> None:
    """PyYAML and the values take 30 ms to import."""
    code = "import sys, llamasup.cli.app; print([m for m in sys.modules if m in ('yaml', 'llamasup.config')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_libyaml_is_installed() -> None:
    assert config_of("models_dir: m") is not None
    assert hasattr(yaml, "CSafeLoader"), (
        "the wheels of PyYAML have libyaml; without it reading is ten times as slow"
    )


def test_files_of_nodes_are_checked(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
        models: {a: {path: demo}}
        peers:
          desk:
            url: https://desk.example.net
            key_file: desk.key
            ca_file: ca.pem
        """,
    )
    (found,) = missing(path)
    assert found.startswith("c.yaml:5: peers.desk.key_file: The file of peers.desk.key_file cannot be read")
    (tmp_path / "desk.key").write_text("sk-1\n")
    (tmp_path / "ca.pem").write_text("none\n")
    (found,) = missing(path)
    assert found.startswith("c.yaml:6: peers.desk.ca_file: The file of peers.desk.ca_file")
    assert "has no certificate" in found
