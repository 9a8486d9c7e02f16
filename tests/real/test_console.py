"""The web console of a real llamasup over HTTP: signing in, what its session allows, and the config."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.driver import Llamasup, llamasup, run_to_end, started, wrapped
from tests.kit.patience import PATIENCE_S, eventually
from tests.real.remains import folders_of

V1 = "/llamasup/v1"
SESSION = f"{V1}/console/session"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class BrowserLike:
    """A client that sends what a browser sends from the console's own page."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        parts = urlsplit(url)
        self.own = {
            "origin": f"{parts.scheme}://{parts.netloc}",
            "x-llamasup-console": "none",
        }

    def __enter__(self) -> BrowserLike:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def change(self, method: str, path: str, body: Any = None, **lines: str) -> httpx.Response:
        headers = {**self.own, **{name.replace("_", "-"): value for name, value in lines.items()}}
        return self.http.request(method, path, json=body, headers=headers)

    def sign_in(self, **body: str) -> httpx.Response:
        answer = self.change("POST", SESSION, body)
        if answer.is_success:
            self.own["x-llamasup-console"] = answer.json()["secret"]
        return answer

    def read(self, path: str) -> Any:
        answer = self.http.get(V1 + path, headers=self.own)
        assert answer.status_code == 200, answer.text
        return answer.json()


def token_of(running: Llamasup, env: Mapping[str, str] | None = None) -> str:
    done = run_to_end("ui", "--print", "--pid", str(running.pid), env=env)
    assert done.returncode == 0, done.stderr
    address, _, token = done.stdout.strip().partition("#token=")
    assert address == f"{running.url}/llamasup/"
    return token


def cause(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, str(answer.json()["error"]["cause"])


@pytest.mark.check("X3", "with a real server")
@pytest.mark.check("X4", "with a real server")
def test_token_signs_in_once_and_only_the_consoles_own_page_uses_the_session(
    runtime: str, tiny_model: Path
) -> None:
    with llamasup(tiny_model, "--runtime", runtime) as running, BrowserLike(running.url) as browser:
        running.wait_for("ready")
        page = browser.http.get("/llamasup/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-frame-options"] == "DENY"
        assert cause(browser.http.get(f"{V1}/status")) == (403, "control_closed")
        assert browser.http.get("/llamasup", follow_redirects=False).headers["location"] == "llamasup/"
        # Under run, the front page stays that of llama-server.
        front = browser.http.get("/", headers={"accept": "text/html"}, follow_redirects=False)
        assert front.status_code != 302

        token = token_of(running)
        answer = browser.sign_in(token=token)
        assert "set-cookie" not in answer.headers
        with BrowserLike(running.url) as other:
            assert cause(other.sign_in(token=token)) == (401, "console_token")

        assert [model["id"] for model in browser.read("/status")["models"]] == ["tiny"]
        assert cause(browser.http.get(SESSION)) == (401, "session")
        assert cause(browser.http.get(f"{V1}/status")) == (403, "control_closed")
        for origin in ("null", browser.own["origin"]):
            refused = browser.change("POST", f"{V1}/reload", x_llamasup_console="none", origin=origin)
            assert cause(refused) == (401, "session")
        assert browser.read("/config") == {"file": None, "text": "", "version": "", "writable": False}
        restart = f"{V1}/models/tiny/restart"
        generation = browser.read("/status")["models"][0]["generation"]
        for lines in (
            {"origin": "http://evil.example"},
            {"origin": "http://127.0.0.1:1"},  # another program of this machine
            {"host": "evil.example", "origin": "http://evil.example"},  # DNS rebinding
            {"x_llamasup_console": ""},
        ):
            assert browser.change("POST", restart, **lines).status_code == 403, lines
        assert browser.read("/status")["models"][0]["generation"] == generation
        assert browser.change("POST", restart).json()["generation"] == generation + 1

        (process,) = (child.pid for child in running.children() if "--model" in child.cmdline())
        settings = {"ctx_size": 1024, "parallel": 1}
        plan = browser.change("POST", f"{V1}/plan", {"model": "tiny", "settings": settings}).json()
        assert plan["argv"][plan["argv"].index("--ctx-size") + 1] == "1024"
        assert (plan["problem"], plan["evicts"], plan["devices"]["ram"]["fits"]) == (None, [], True)
        assert [c.pid for c in running.children() if "--model" in c.cmdline()] == [process]

        (ram,) = (device for device in browser.read("/memory")["devices"] if device["name"] == "ram")
        (held,) = ram["models"]
        assert held["predicted"]["total_bytes"] > 0
        assert held["measured_bytes"] > 1 << 20

        assert browser.change("DELETE", SESSION).json() == {"ended": True}
        assert cause(browser.http.get(f"{V1}/status", headers=browser.own)) == (401, "session")
        assert running.stop() == 0


def test_run_without_ui_serves_no_console(runtime: str, tiny_model: Path) -> None:
    with llamasup(tiny_model, "--runtime", runtime, "--no-ui") as running:
        running.wait_for("ready")
        assert cause(httpx.get(f"{running.url}/llamasup/")) == (403, "control_closed")
        done = run_to_end("ui", "--print", "--pid", str(running.pid))
        assert (done.returncode, done.stdout) == (75, "")
        assert "--no-ui" in done.stderr
        assert running.stop() == 0


@pytest.mark.one_runtime
def test_wrap_serves_no_console(llama_server: str, tiny_model: Path) -> None:
    with wrapped(llama_server, "-m", str(tiny_model), "--port", "0", "-c", "256") as running:
        bare = httpx.get(f"{running.url}/llamasup/")
        assert bare.status_code == 404  # as llama-server answers
        done = run_to_end("ui", "--print", "--pid", str(running.pid))
        assert done.returncode == 75
        assert running.stop() == 0


class Served:
    def __init__(self, running: Llamasup, config: Path, env: Mapping[str, str]) -> None:
        self.running = running
        self.config = config
        self.env = env


@contextmanager
def serving(runtime: str, tiny_model: Path, home: Path) -> Iterator[Served]:
    """``serve`` with a config file of one model, and keys for inference and for control."""
    keys, model, path = home / "keys", home / "tiny.gguf", home / "config.yaml"
    keys.write_text("phone-key name=phone\nadmin-key name=ann rights=inference,control\n")
    keys.chmod(0o600)
    model.write_bytes(tiny_model.read_bytes())
    path.write_text(
        f"listen: 127.0.0.1:0\nruntime: {runtime}\nauth: {{api_key_file: {keys}}}\n"
        f"models:\n  tiny: {{path: {model}, ctx_size: 512, parallel: 1}}\n"
    )
    env = {**os.environ, **folders_of(home)}
    with started("serve", "--config", str(path), env=env) as running:
        running.wait_for("ready")
        yield Served(running, path, env)


@pytest.mark.check("X4")
def test_key_with_the_right_control_signs_in_and_replaces_the_config(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    with serving(runtime, tiny_model, tmp_path) as served, BrowserLike(served.running.url) as browser:
        front = browser.http.get("/", headers={"accept": "text/html,*/*;q=0.8"}, follow_redirects=False)
        assert (front.status_code, front.headers["location"]) == (302, "llamasup/")
        assert browser.http.get("/llamasup/").status_code == 200

        assert cause(browser.sign_in(key="phone-key")) == (401, "key_rights")
        assert cause(browser.sign_in(key="wrong")) == (401, "api_key")
        session = browser.sign_in(key="admin-key").json()
        assert (session["name"], session["models_need_key"], session["config"]) == ("ann", True, True)
        own_key = {"authorization": f"Bearer {session['inference_key']}"}

        # The secret is not valid for the models; the key of the pages is, and only for them.
        assert cause(browser.change("POST", "/v1/chat/completions", CHAT)) == (401, "api_key")
        assert browser.http.post("/v1/chat/completions", json=CHAT, headers=own_key).status_code == 200
        with httpx.Client(base_url=served.running.url) as bare:
            assert cause(bare.get(f"{V1}/status", headers=own_key)) == (403, "key_rights")
        history = browser.read("/history")["series"]
        assert sum(history["tokens_per_s"]) > 0
        assert history["memory_bytes"][-1] > 0

        before = browser.read("/config")
        assert (before["text"], before["writable"]) == (served.config.read_text(), True)
        wrong = before["text"].replace("ctx_size: 512", "ctx_sise: 512")
        check = browser.change("POST", f"{V1}/config/check", {"text": wrong}).json()
        assert [(mistake["line"], check["ok"]) for mistake in check["mistakes"]] == [(5, False)]
        refused = browser.change("PUT", f"{V1}/config", {"text": wrong, "version": before["version"]})
        assert refused.json()["mistakes"] == check["mistakes"]
        assert cause(refused) == (400, "config_invalid")

        text = before["text"].replace("ctx_size: 512", "ctx_size: 768")
        preview = browser.change("POST", f"{V1}/config/check", {"text": text}).json()
        changes = browser.change("PUT", f"{V1}/config", {"text": text, "version": before["version"]}).json()
        assert changes["changed"] == preview["changes"]["changed"] == ["tiny"]
        assert served.config.read_text() == text
        stale = browser.change("PUT", f"{V1}/config", {"text": before["text"], "version": before["version"]})
        assert cause(stale) == (409, "conflict")

        def context() -> int:
            props = browser.http.get("/props?model=tiny", headers=own_key).json()
            return int(props["default_generation_settings"]["n_ctx"])

        eventually(lambda: context() == 768)  # until then the former process serves
        assert served.running.stop() == 0


@pytest.mark.one_runtime
def test_removed_key_ends_its_sessions_and_their_streams(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    with serving(runtime, tiny_model, tmp_path) as served, BrowserLike(served.running.url) as browser:
        session = browser.sign_in(key="admin-key").json()
        own_key = {"authorization": f"Bearer {session['inference_key']}"}
        with browser.http.stream("GET", f"{V1}/events", headers=browser.own) as events:
            lines = (line for line in events.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines).removeprefix("data: "))["event"] == "state"
            (tmp_path / "keys").write_text("phone-key name=phone\n")
            assert list(lines) == []  # it ends
        assert cause(browser.http.get(f"{V1}/status", headers=browser.own)) == (401, "session")
        assert cause(browser.http.post("/v1/chat/completions", json=CHAT, headers=own_key)) == (
            401,
            "api_key",
        )
        assert served.running.stop() == 0


@pytest.mark.one_runtime
@pytest.mark.check("X15", "403 with a real server")
def test_config_over_tcp_names_nothing_new(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sk-secret")
    started, log = tmp_path / "started", tmp_path / "log"
    servers = json.dumps({"mcpServers": {"x": {"command": "touch", "args": [str(started)]}}})
    parts = [
        f"defaults: {{extra: [--mcp-servers-json, '{servers}']}}",
        f"defaults: {{extra: [--log-file, {log}]}}",
        f"defaults: {{extra: [--path, {tmp_path}]}}",
        "virtual_models: {v: {model: tiny, system: 'of ${HOME}'}}",
        f"peers: {{p: {{url: 'https://127.0.0.1:1', key_file: {tmp_path}/secret}}}}",
        f"models_dir: {tmp_path}/other",
        f"downloads: {{folder: {tmp_path}/other}}",
        "http: {api_config: full}",
    ]
    with serving(runtime, tiny_model, tmp_path) as served, BrowserLike(served.running.url) as browser:
        browser.sign_in(key="admin-key")
        control = {"authorization": "Bearer admin-key"}
        before = browser.read("/config")
        texts = [f"{before['text']}{part}\n" for part in parts]
        texts.append(before["text"].replace(str(runtime), f"{tmp_path}/secret"))
        for text in texts:
            change = {"text": text, "version": before["version"]}
            with httpx.Client(base_url=served.running.url, headers=control) as client:
                by_key = client.put(f"{V1}/config", json=change)
            for refused in (browser.change("PUT", f"{V1}/config", change), by_key):
                assert cause(refused) == (403, "config_refused")
                assert refused.json()["mistakes"], text
            check = browser.change("POST", f"{V1}/config/check", {"text": text}).json()
            assert (check["ok"], check["mistakes"]) == (False, by_key.json()["mistakes"])
            assert "sk-secret" not in by_key.text
        assert served.config.read_text() == before["text"]
        assert served.running.stop() == 0
    assert not started.exists()
    assert not log.exists()


@pytest.mark.one_runtime
@pytest.mark.check("X17")
def test_token_over_tcp_gives_no_more_than_its_key(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    with serving(runtime, tiny_model, tmp_path) as served, BrowserLike(served.running.url) as browser:
        keys = tmp_path / "keys"
        keys.write_text("phone-key name=phone\nwatch-key name=watch rights=control\n")
        own = {"authorization": "Bearer watch-key"}
        eventually(lambda: browser.http.get(f"{V1}/status", headers=own).status_code == 200)
        tokens = [browser.http.post(f"{V1}/console/token", headers=own).json()["token"] for _ in range(2)]
        session = browser.sign_in(token=tokens[0]).json()
        assert (session["name"], session["inference_key"]) == ("watch", None)
        keys.write_text("phone-key name=phone\nother-key name=other rights=control\n")
        eventually(lambda: browser.http.get(f"{V1}/status", headers=browser.own).status_code == 401)
        assert cause(browser.sign_in(token=tokens[1])) == (401, "console_token")
        assert served.running.stop() == 0


@pytest.mark.one_runtime
@pytest.mark.check("X8", "413")
def test_too_large_change_is_refused_over_tcp(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    with serving(runtime, tiny_model, tmp_path) as served, BrowserLike(served.running.url) as browser:
        browser.sign_in(token=token_of(served.running, served.env))
        version = browser.read("/config")["version"]
        large = {"text": "#" * (5 << 20), "version": version}
        assert cause(browser.change("PUT", f"{V1}/config", large)) == (413, "body_limit")
        assert browser.read("/config")["version"] == version
        assert served.running.stop() == 0
