"""Pages at the address of the console that are not its own: llama-server's, and those of another node."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from llamasup.core.pool.catalog.v1_models import NodeModel
from tests.e2e.driver import llamasup, started
from tests.extended.browser.conftest import PATIENCE_MS, Console, Serve, card, show, sign_in
from tests.kit.backends import node_answer
from tests.kit.paths import ROOT
from tests.kit.ports import free_port
from tests.real.remains import folders_of

pytestmark = pytest.mark.one_runtime
CANNOT_RUN_HERE = 77
NewContext = Callable[..., BrowserContext]

EMPTY = '<!doctype html><link rel="icon" href="data:,">'
READS = """async path => {
    const secrets = Object.values({ ...localStorage, ...sessionStorage, name: window.name }).filter(Boolean);
    const page = new DOMParser().parseFromString(await (await fetch("/llamasup/")).text(), "text/html");
    const known = page.querySelector("meta[name=llamasup-page]").content;
    const tried = [undefined, known, ...secrets].map((secret) => secret && { "X-Llamasup-Console": secret });
    const read = async (headers) => (await fetch(path, { headers, credentials: "include" })).status;
    return await Promise.all(tried.map(read));
}"""
"""The statuses of a read with everything that a script of this address can get hold of."""

REACHES_INTO = """() => {
    try {
        return opened.document.title;
    } catch (error) {
        return error.name;
    }
}"""


@pytest.fixture(scope="module")
def with_pages() -> str:
    """The llama-server of the wheel, which has its web interface. The one from source has none."""
    found = subprocess.run(
        [ROOT / "scripts" / "llama-server", "0.10068.0"], stdout=subprocess.PIPE, text=True
    )
    if found.returncode == CANNOT_RUN_HERE:
        pytest.skip("the wheel has no llama-server for this machine")
    assert found.returncode == 0
    return found.stdout.strip()


@pytest.fixture(scope="module")
def run(with_pages: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A llamasup run whose llama-server has its web interface."""
    env = {**os.environ, **folders_of(tmp_path_factory.mktemp("b"))}
    with llamasup(tiny_model, "--runtime", with_pages, "--ctx-size", "512", env=env) as running:
        running.wait_for("ready")
        yield Console(running, running.url, tiny_model, env)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Not watched, because llama-server's page writes warnings into the log of the browser."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


def test_console_of_run_works_in_an_origin_of_its_own(run: Console, context: BrowserContext) -> None:
    page = sign_in(context, run)
    assert page.evaluate("origin") == "null"
    assert context.cookies() == []
    show(page, "Playground")
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("first token after")).to_be_visible()
    show(page, "Models")
    (model,) = run.running.wait_for("ready")["models"]
    card(page, model).get_by_role("button", name=f"Restart {model}", exact=True).click()
    expect(card(page, model).locator(".state")).to_have_text("ready")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()


def test_page_of_an_ended_llamasup_is_loaded_again_and_signs_in(
    llama_server: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, context: BrowserContext
) -> None:
    """The secret of its page was that of the ended process."""
    env = {**os.environ, **folders_of(tmp_path_factory.mktemp("b"))}
    words = ("run", str(tiny_model), "--runtime", llama_server, "--ctx-size", "512", "--no-warmup", "--port")
    port = str(free_port())
    with started(*words, port, env=env) as first:
        page = sign_in(context, Console(first, first.url, tiny_model, env))
        assert first.stop() == 0
    with started(*words, port, env=env) as second:
        expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("This browser is not signed in")
        page.goto(Console(second, second.url, tiny_model, env).signing_url())
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        assert second.stop() == 0


@pytest.mark.check("X3")
def test_page_of_llama_server_works_and_does_not_reach_the_console(
    run: Console, context: BrowserContext
) -> None:
    console = sign_in(context, run)
    page = context.new_page()
    page.goto(run.url)
    box = page.locator("textarea").first
    box.fill("Hello")
    with page.expect_response(lambda answer: "chat/completions" in answer.url) as answer:
        box.press("Enter")
    assert answer.value.ok
    assert page.evaluate("localStorage.length") > 0  # it has its storage
    statuses = page.evaluate(READS, "/llamasup/v1/config")
    assert set(statuses) <= {401, 403}
    with context.expect_page() as opened:
        page.evaluate("window.opened = open('/llamasup/')")
    expect(opened.value.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
    assert page.evaluate(REACHES_INTO) in ("SecurityError", "TypeError")  # without a window: COOP
    refused = "navigator.serviceWorker.register('/sw.js').then(() => 'registered', (error) => error.name)"
    assert page.evaluate(refused) != "registered"
    # The tab of the console goes to another page of this address, which reads what the console left behind.
    console.goto(run.url)
    assert set(console.evaluate(READS, "/llamasup/v1/config")) <= {401, 403}


@pytest.mark.check("X3")
def test_sandboxed_page_of_another_site_reads_nothing(run: Console, context: BrowserContext) -> None:
    page = context.new_page()
    policy = {"content-security-policy": "sandbox allow-scripts"}
    page.route(
        "**/evil",
        lambda route: route.fulfill(body=EMPTY, content_type="text/html", headers=policy),
    )
    page.goto("http://localhost:9999/evil")
    assert page.evaluate("origin") == "null"
    for method, path in (("GET", "status"), ("GET", "console/session"), ("POST", "console/session")):
        status = page.evaluate(
            """async ([url, method]) => {
                const body = method === "POST" ? "{}" : undefined;
                return fetch(url, { method, headers: { "X-Llamasup-Console": "1" }, body })
                    .then((answer) => answer.status, (error) => error.name);
            }""",
            [f"{run.url}/llamasup/v1/{path}", method],
        )
        assert status in (401, "TypeError")
    cannot_read = "url => fetch(url).then((answer) => answer.text(), (error) => error.name)"
    for path in ("/llamasup/", "/v1/models", "/llamasup/v1/status"):
        assert page.evaluate(cannot_read, run.url + path) == "TypeError"


# --- answers of another node

EVIL = b"<!doctype html><title>a page</title><script>document.title = 'run'</script>"


class Node(BaseHTTPRequestHandler):
    """A node that answers every path but the list of its models with a page or a script."""

    def do_GET(self) -> None:
        body = node_answer("n", [NodeModel("remote", state="ready", slots=1)])
        kind = "application/json"
        if self.path != "/v1/models":
            body, kind = (b"1", "text/javascript") if ".js" in self.path else (EVIL, "text/html")
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (("Set-Cookie", "a=b"), ("Service-Worker-Allowed", "/"), ("Refresh", "0; url=/y")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.check("X16")
def test_page_of_another_node_runs_no_script(serve: Serve, node: str, context: BrowserContext) -> None:
    console = serve({"tiny": {}}, peers={"other": {"url": node}})
    page = sign_in(context, console)
    url = f"{console.url}/x.html?model=remote"
    answer = page.goto(url)
    assert answer is not None
    assert answer.status == 403
    assert json.loads(answer.text())["error"]["cause"] == "fetch_destination"
    page.goto(console.page_url)
    policy = "script-src 'self'"
    page.route("**/frame", lambda route: route.fulfill(body=EMPTY, content_type="text/html"))
    page.goto(f"{console.url}/frame")
    assert policy not in page.content()
    for element in ("iframe", "embed", "script"):
        page.evaluate(
            """([name, src]) => new Promise((done) => {
                const element = document.createElement(name);
                Object.assign(element, { src, onload: done, onerror: done });
                document.body.append(element);
            })""",
            [element, url],
        )
    assert page.title() == ""
    worker = "navigator.serviceWorker.register('/w.js?model=remote').then(() => 'registered', (e) => e.name)"
    assert page.evaluate(worker) != "registered"
    assert context.cookies() == []
    # An old browser does not say what it makes of an answer.
    old = httpx.get(url)
    assert old.content == EVIL
    assert old.headers["content-type"] == "application/octet-stream"
    assert old.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert old.headers["x-content-type-options"] == "nosniff"
    assert not {"set-cookie", "service-worker-allowed", "refresh"} & set(old.headers)


@pytest.mark.check("X4")
def test_playground_sends_no_cookies(serve: Serve, context: BrowserContext) -> None:
    console = serve({"tiny": {"preload": True}})
    context.add_cookies([{"name": "other", "value": "secret", "url": console.url}])
    page = sign_in(context, console)
    show(page, "Playground")
    page.get_by_label("Message").fill("Hello")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send").click()
    assert "cookie" not in asked.value.all_headers()
