"""The console and the API below a path, behind a real nginx and a real Caddy with the blocks of the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, expect

from tests.extended.browser.conftest import ADMIN, CONTENT, Serve, card, show
from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port

pytestmark = pytest.mark.one_runtime

DOCS = (ROOT / "docs" / "reverse-proxies.md").read_text("utf-8")
UPSTREAM = "127.0.0.1:8080"
NGINX = """
daemon off; master_process off; pid nginx.pid; error_log stderr; worker_processes 1; events {{}}
http {{
    access_log off; client_body_temp_path t; proxy_temp_path t; fastcgi_temp_path t; uwsgi_temp_path t;
    scgi_temp_path t;
    server {{ listen 127.0.0.1:{port}; {block} }}
}}
"""
CADDY = """
{{
    admin off
    auto_https off
}}
http://127.0.0.1:{port} {{
{block}
}}
"""
CONFIGS = {"nginx": NGINX, "caddy": CADDY}
COMMANDS = {
    "nginx": ("nginx", "-p", ".", "-e", "stderr", "-c", "config"),
    "caddy": ("caddy", "run", "--adapter", "caddyfile", "--config", "config"),
}


def block_of(program: str) -> str:
    """The block of the docs for this program."""
    found = re.search(rf"<!-- tried: {program} -->\n```\w+\n(.*?)\n```", DOCS, re.DOTALL)
    assert found is not None
    assert UPSTREAM in found[1]
    return found[1]


@pytest.fixture(params=CONFIGS)
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Start the reverse proxy for the llamasup at a URL; returns the URL of the prefix."""
    program: str = request.param
    if shutil.which(program) is None:
        pytest.skip(f"{program} is missing: run `apt-get install {program}`")
    started: list[subprocess.Popen[bytes]] = []

    def start(url: str) -> str:
        port = free_port()
        block = block_of(program).replace(UPSTREAM, url.removeprefix("http://"))
        (tmp_path / "config").write_text(CONFIGS[program].format(port=port, block=block))
        env = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
        started.append(subprocess.Popen(COMMANDS[program], cwd=tmp_path, env=env))
        prefix = f"http://127.0.0.1:{port}/llm"

        def answers() -> bool:
            try:
                return httpx.get(f"{prefix}/livez").status_code == 200
            except httpx.TransportError:
                return False

        eventually(answers)
        return prefix

    yield start
    for process in started:
        process.kill()  # Caddy would wait for the page, which reads events
        process.wait(PATIENCE_S)


def test_console_works_below_a_path(
    serve: Serve, new_context: Callable[..., BrowserContext], behind: Callable[[str], str], tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    console = serve(
        {"tiny": {"ctx_size": 512}},
        keys=f"{ADMIN} name=admin rights=inference,control\n",
        http={"trusted_proxies": "127.0.0.1", "access_log": str(log)},
    )
    prefix = behind(console.url)
    page = new_context().new_page()
    page.goto(f"{prefix}/")  # which leads a browser to the console
    expect(page).to_have_url(f"{prefix}/llamasup/")
    page.get_by_label("Key").fill(ADMIN)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    for name in CONTENT:
        show(page, name)
    show(page, "Models")
    page.get_by_role("button", name="Load tiny", exact=True).click()
    expect(card(page, "tiny")).to_contain_text("ready")  # which the events say
    page.goto(f"{prefix}/llamasup")
    expect(page).to_have_url(f"{prefix}/llamasup/")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()  # the session is kept
    show(page, "Playground")
    page.get_by_role("textbox").last.fill("Once")
    page.get_by_role("button", name="Send", exact=True).click()
    eventually(lambda: log.exists() and "/v1/chat/completions" in log.read_text())


def test_clients_work_below_a_path(serve: Serve, behind: Callable[[str], str], tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    console = serve(
        {"tiny": {"ctx_size": 512}}, http={"trusted_proxies": "127.0.0.1", "access_log": str(log)}
    )
    prefix = behind(console.url)
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 3, "stream": True, "ignore_eos": True}
    spoofed = {"X-Forwarded-For": "203.0.113.7"}
    for path in ("/v1/completions", "//v1/completions", "/v1/completions/"):
        with httpx.stream("POST", prefix + path, json=body, headers=spoofed, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            assert answer.read().endswith(b"data: [DONE]\n\n")
    handshake = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    assert httpx.get(f"{prefix}/v1/responses", headers=handshake, timeout=PATIENCE_S).status_code == 426
    large = b'{"content":"' + b"a" * (40 << 20) + b'"}'
    assert httpx.post(f"{prefix}/tokenize?model=tiny", content=large, timeout=PATIENCE_S).status_code == 200
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    clients = {line["client"] for line in lines if line["path"] == "/v1/completions"}
    # nginx appends its client, here at a trusted address. Caddy drops what a client says.
    assert clients in ({"203.0.113.7"}, {"127.0.0.1"})
