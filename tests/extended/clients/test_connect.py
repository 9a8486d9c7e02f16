"""``llamasup connect``: its settings work with real clients, in front of real llama-servers."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.conftest import KEY, Served
from tests.clients.prompts import QUESTION
from tests.e2e.driver import run_to_end, started
from tests.kit import models
from tests.kit.scripted import Call, scripted
from tests.real.remains import folders_of

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("w")  # short: sockets lie below it


@pytest.fixture(scope="module")
def env(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    settings = {"HOME": str(home), "LLAMASUP_API_KEY": KEY}
    without = ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "LLAMASUP_URL")
    own = {name: value for name, value in os.environ.items() if name not in without}
    return {**own, **folders_of(home), **cache, **settings}


@pytest.fixture(scope="module")
def served(runtime: str, home: Path, env: dict[str, str]) -> Iterator[Served]:
    (home / "keys").write_text(f"{KEY} name=all\n")
    (home / "keys").chmod(0o600)
    (home / "here.gguf").write_bytes(models.tiny_decoder())
    (home / "caller.gguf").write_bytes(
        scripted([Call("read_file", {"path": "notes.txt"})], "It is read now.")
    )
    config = {
        "listen": "127.0.0.1:0",
        "runtime": runtime,
        "auth": {"api_key_file": str(home / "keys")},
        "models": {
            "here": {"path": str(home / "here.gguf"), "preload": True, "aliases": ["gpt"]},
            "caller": {"path": str(home / "caller.gguf")},
        },
        "virtual_models": {"here:short": {"model": "here", "set": {"max_tokens": 3}}},
    }
    (home / "config.yaml").write_text(json.dumps(config))
    with started("serve", "--config", str(home / "config.yaml"), env=env) as running:
        yield Served(running, running.url)
        assert running.stop() == 0


def settings_of(client: str, env: dict[str, str], *options: str) -> Any:
    ended = run_to_end("connect", client, "--model", "here:short", "--json", *options, env=env)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_openai_works_with_its_variables(
    served: Served, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings_of("openai", env)
    assert found["environment"]["OPENAI_BASE_URL"] == served.v1
    for name, value in found["environment"].items():
        monkeypatch.setenv(name, value)
    with openai.OpenAI(max_retries=0) as client:
        answer = client.chat.completions.create(model="here:short", messages=MESSAGES)
    assert answer.usage
    assert answer.usage.completion_tokens == 3


def test_settings_of_claude_code_work_with_anthropic(
    served: Served, env: dict[str, str], tmp_path: Path
) -> None:
    env = {**env, "CLAUDE_CONFIG_DIR": str(tmp_path)}
    file = tmp_path / "settings.json"
    file.write_text('{"theme": "dark"}')
    file.chmod(0o640)

    ended = run_to_end("connect", "claude-code", "--model", "here:short", "--write", env=env)

    assert ended.returncode == 0, ended.stderr
    assert f"--- {file}" in ended.stdout
    assert KEY not in ended.stdout + ended.stderr
    assert f"The file before is {file}.bak" in ended.stderr
    assert (tmp_path / "settings.json.bak").read_text() == '{"theme": "dark"}'
    written = json.loads(file.read_text())
    assert written["theme"] == "dark"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # it has the key
    assert "mode 0600, before 0640" in ended.stderr
    to = written["env"]
    with anthropic.Anthropic(
        base_url=to["ANTHROPIC_BASE_URL"], auth_token=to["ANTHROPIC_AUTH_TOKEN"], max_retries=0
    ) as client:
        answer = client.messages.create(model=to["ANTHROPIC_MODEL"], messages=MESSAGES, max_tokens=99)
    assert answer.usage.output_tokens == 3

    again = run_to_end("connect", "claude-code", "--model", "here:short", "--write", env=env)
    assert "has these settings already" in again.stderr
    other = run_to_end("connect", "claude-code", "--model", "here", "--write", env=env)
    assert other.returncode == 0
    assert json.loads((tmp_path / "settings.json.bak1").read_text()) == written


def test_settings_of_codex_work_with_responses(served: Served, env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    found = settings_of("codex", env, "--write", "--file", str(file))
    assert (found["file"], found["backup"]) == (str(file), None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = tomllib.loads(file.read_text())
    provider = written["model_providers"][written["model_provider"]]
    key = found["environment"][provider["env_key"]]
    with openai.OpenAI(base_url=provider["base_url"], api_key=key, max_retries=0) as client:
        answer = client.responses.create(model=written["model"], input=QUESTION)
    assert answer.usage
    assert answer.usage.output_tokens == 3


def test_settings_are_shown_without_writing(served: Served, env: dict[str, str], home: Path) -> None:
    ended = run_to_end("connect", "opencode", "--model", "gpt", env=env)
    assert ended.returncode == 0, ended.stderr
    assert f"# opencode: add this to {home}/.config/opencode/opencode.json\n{{\n" in ended.stdout
    assert f"export LLAMASUP_API_KEY={KEY}" in ended.stdout
    assert not (home / ".config" / "opencode").exists()
    steps = run_to_end("connect", "cline", "--model", "here", env=env)
    assert f"2. Base URL: {served.v1}" in steps.stdout


def test_model_and_key_are_checked(served: Served, env: dict[str, str], home: Path) -> None:
    for options, code, message in (
        ((), 2, "3 models are served at"),
        (("--model", "nope"), 2, "Choose one of here, caller, here:short."),
        (("--model", "here", "--api-key-file", str(home / "keys")), 78, "has 2 words, not one key"),
        (("--model", "here", "--api-key-file", str(home / "nothing")), 78, "cannot be read"),
        (("--url", "127.0.0.1:9", "--model", "here"), 69, "No llamasup answers at http://127.0.0.1:9"),
        (("--url", "http://me:pw@127.0.0.1:9"), 2, "The URL contains a user name or a password."),
    ):
        ended = run_to_end("connect", "zed", *options, env=env)
        assert ended.returncode == code, (options, ended.stderr)
        assert message in ended.stderr, options
    (home / "wrong").write_text("sk-wrong\n")
    refused = run_to_end("connect", "zed", "--api-key-file", str(home / "wrong"), env=env)
    assert refused.returncode != 0
    assert "key" in refused.stderr
    (home / "right").write_text(f"{KEY}\n")
    url = run_to_end(
        *("connect", "openai", "--url", served.v1, "--model", "here", "--api-key-file", str(home / "right")),
        env={**env, "LLAMASUP_API_KEY": ""},
    )
    assert f"export OPENAI_BASE_URL={served.v1}" in url.stdout


def test_file_that_cannot_be_kept_is_left_alone(served: Served, env: dict[str, str], home: Path) -> None:
    file = home / "zed.json"
    for content in ("// mine\n{}", "\udcff"):
        file.write_text(content, errors="surrogateescape")
        before = file.read_bytes()
        ended = run_to_end("connect", "zed", "--model", "here", "--write", "--file", str(file), env=env)
        assert ended.returncode == 78
        assert "is not changed" in ended.stderr
        assert file.read_bytes() == before
    long = home / "long.toml"
    long.write_text("# mine\n" * 200_000)
    ended = run_to_end("connect", "codex", "--model", "here", "--write", "--file", str(long), env=env)
    assert (ended.returncode, "it has more than 1 MiB" in ended.stderr) == (78, True)
    assert long.read_text() == "# mine\n" * 200_000
    folder = run_to_end("connect", "zed", "--model", "here", "--write", "--file", str(home), env=env)
    assert folder.returncode != 0
    assert "Internal error" not in folder.stderr


def test_empty_settings_file_keeps_its_permissions(
    served: Served, env: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "empty.json"
    file.touch(0o640)
    file.chmod(0o640)
    ended = run_to_end("connect", "zed", "--model", "here", "--write", "--file", str(file), env=env)
    assert ended.returncode == 0, ended.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert "llamasup" in file.read_text()


def test_link_to_a_settings_file_stays_a_link(served: Served, env: dict[str, str], tmp_path: Path) -> None:
    target, link = tmp_path / "dotfiles.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    ended = run_to_end("connect", "zed", "--model", "here", "--write", "--file", str(link), env=env)
    assert ended.returncode == 0, ended.stderr
    assert link.is_symlink()
    assert "llamasup" in target.read_text()


def test_clients_are_listed_and_unknown_ones_refused(env: dict[str, str]) -> None:
    listed = run_to_end("connect", env=env)
    assert listed.stdout.splitlines()[0] == "claude-code     Claude Code"
    assert json.loads(run_to_end("connect", "--json", env=env).stdout)["clients"][1]["name"] == "codex"
    unknown = run_to_end("connect", "claud-code", env=env)
    assert (unknown.returncode, "Did you mean claude-code?" in unknown.stderr) == (2, True)
    no_file = run_to_end("connect", "openai", "--write", env=env)
    assert (no_file.returncode, "has no settings file" in no_file.stderr) == (2, True)


@pytest.mark.parametrize(
    ("client", "path"),
    [
        ("claude", "/v1/messages"),
        ("codex", "/v1/responses"),
        ("opencode", "/v1/chat/completions"),
    ],
)
def test_check_sends_a_request_as_the_client_does(
    served: Served, env: dict[str, str], client: str, path: str
) -> None:
    found = settings_of(client, env, "--check")
    assert (found["path"], found["tool_call"]) == (path, None)
    assert found["text"]
    assert found["first_token_s"] >= 0
    assert found["prompt_tokens"] > found["cached_tokens"] >= 0
    assert found["context"] > 0
    shown = run_to_end("connect", client, "--model", "here:short", "--check", env=env)
    assert f"POST {path} at {served.url}, model 'here:short'" in shown.stdout
    assert KEY not in shown.stdout + shown.stderr


@pytest.mark.parametrize("client", ["claude", "codex", "opencode"])
def test_check_shows_a_call_of_its_tool(served: Served, env: dict[str, str], client: str) -> None:
    """``caller`` is a model that answers a request with tools with a call."""
    words = ("connect", client, "--model", "caller", "--check")
    found = json.loads(run_to_end(*words, "--json", env=env).stdout)
    assert (found["tool_call"], found["text"]) == ("read_file", "")
    assert found["first_token_s"] >= 0
    assert "answer       a call of the tool 'read_file'" in run_to_end(*words, env=env).stdout


def test_check_reports_the_error_of_the_server(served: Served, env: dict[str, str]) -> None:
    wrong = {**env, "LLAMASUP_API_KEY": "sk-wrong"}
    refused = run_to_end("connect", "codex", "--model", "here", "--check", env=wrong)
    assert refused.returncode == 77
    written = run_to_end("connect", "codex", "--model", "here", "--check", "--write", env=env)
    assert written.returncode == 2
    assert "--check changes no file." in written.stderr
