"""A real Chromium, and consoles of real llamasups for it. A page with an error in its log fails its test."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, expect, sync_playwright

from tests.e2e.driver import Llamasup, run_to_end, started
from tests.kit import models
from tests.kit.patience import PATIENCE_S
from tests.kit.runtimes import wrapped_runtime
from tests.real.remains import folders_of

PATIENCE_MS = PATIENCE_S * 1000
CONTENT = {
    "Models": "input[type=search]",
    "Memory": ".legend",
    "Requests": "h2:text-is('Finished')",
    "Plan": "pre.command",
    "Playground": ".tabs",
    "Batches": "p.note, table.batches",
    "Logs": "pre.log",
    "Usage": "label:has-text('Days')",
    "Config": "textarea.code",
}
"""What only this page has. Its heading appears before its module is loaded, above the page before it."""

ADMIN = "sk-of-the-admin"
LOG_LINE = r"\033[31mred\033[0m \033]0;title\007 \377 <b>bold</b>"
"""What each server writes first, as printf takes it: a colour, a window title, invalid UTF-8 and HTML."""

expect.set_options(timeout=PATIENCE_MS)


class Console(NamedTuple):
    """A llamasup serve and its folders."""

    running: Llamasup
    url: str
    config: Path
    env: dict[str, str]

    @property
    def page_url(self) -> str:
        return f"{self.url}/llamasup/"

    def signing_url(self) -> str:
        """The address that signs a browser in, once."""
        done = run_to_end("ui", "--print", env=self.env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def sign_in_file(self) -> str:
        """The address of the file that `llamasup ui` lets a browser open."""
        opened = self.config.with_name("opened")
        done = run_to_end("ui", env={**self.env, "BROWSER": f"sh -c 'printf %s \"$1\" >{opened}' sh"})
        assert done.returncode == 0, done.stderr
        return opened.read_text()


Serve = Callable[..., Console]


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of Debian's Chromium, or of another one."""
    path = os.environ.get("LLAMASUP_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get("LLAMASUP_REQUIRE_BROWSER") == "1":
            pytest.fail("Chromium is missing, and LLAMASUP_REQUIRE_BROWSER is set")
        pytest.skip(
            "Chromium is missing: run `apt-get install chromium`, or set LLAMASUP_CHROMIUM to its path"
        )
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """One for each module: while Playwright runs, other tests of this process can start no event loop."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def serve(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start a llamasup serve with these settings of its config; it ends with the module."""
    opened = ExitStack()
    made = {"chat": models.tiny_decoder(), "encoder": models.tiny_encoder(), "ranker": models.tiny_reranker()}

    def start(served: dict[str, Any], *options: str, keys: str | None = None, **settings: Any) -> Console:
        """``served``: the settings of each model; ``content``: chat, encoder or ranker."""
        home = tmp_path_factory.mktemp("b")  # short: sockets lie below it
        writes_line = f"case \"$*\" in *--model*) printf '{LOG_LINE}\\n' >&2 ;; esac"
        wrapper = wrapped_runtime(home, runtime, writes_line)
        config: dict[str, Any] = {"listen": "127.0.0.1:0", "runtime": wrapper, **settings}
        for content, bytes_ in made.items():
            (home / content).write_bytes(bytes_)
        config["models"] = {}
        for number, (name, model) in enumerate(served.items()):
            file = home / f"{number}.gguf"  # of its own: two names of one file are one model
            file.hardlink_to(home / model.get("content", "chat"))
            options_of_model = {key: value for key, value in model.items() if key != "content"}
            config["models"][name] = {"path": str(file), **options_of_model}
        if keys is not None:
            (home / "keys").write_text(keys)
            (home / "keys").chmod(0o600)
            config["auth"] = {"api_key_file": str(home / "keys")}
        path = home / "config.yaml"
        path.write_text(json.dumps(config, indent=2))  # which is YAML
        cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
        env = {**os.environ, **folders_of(home), **cache}
        running = opened.enter_context(started("serve", "--config", str(path), *options, env=env))
        return Console(running, running.url, path, env)

    with opened:
        yield start


@contextmanager
def watched(context: BrowserContext) -> Iterator[BrowserContext]:
    """Fail if a page of the context throws, breaks its policy, or does not get a file."""
    mistakes: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # A refused request of the control API is shown on the page, and the browser writes a line as well. It
        # asks for the icon of a site at any time, also of a server that answers only with a key.
        path = urlsplit(message.location.get("url", "")).path
        expected = "/v1/" in path or path == "/favicon.ico"
        is_answer = message.text.startswith("Failed to load resource") and expected
        if message.type in ("error", "warning") and not is_answer:
            mistakes.append(f"{path}: {message.text}")

    context.on("console", note)
    context.on("weberror", lambda error: mistakes.append(str(error.error)))
    context.set_default_timeout(PATIENCE_MS)
    yield context
    for page in context.pages:
        # Else a handler that runs while its page closes fails a later test. It may hold its route for ever.
        page.unroute_all(behavior="ignoreErrors")
    context.close()
    assert mistakes == []


@pytest.fixture
def new_context(browser: Browser) -> Iterator[Callable[..., BrowserContext]]:
    """A new browser profile, which knows no session unless ``storage_state`` has one."""
    with ExitStack() as opened:
        yield lambda **options: opened.enter_context(watched(browser.new_context(**options)))


def sign_in(context: BrowserContext, console: Console) -> Page:
    page = context.new_page()
    page.goto(console.signing_url())
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    return page


def show(page: Page, name: str) -> None:
    """Open a page of the console by its link."""
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.locator(CONTENT[name])).to_be_visible()
    expect(page.get_by_text("Loading…")).to_have_count(0)


def card(page: Page, model: str) -> Any:
    """The part of the page of models that shows this one."""
    return page.locator(".card").filter(has=page.get_by_role("button", name=f"Load {model}", exact=True))


def with_models(page: Page, changed: Callable[[list[Any]], list[Any]]) -> None:
    """Reload the page, and change the models of each status that it reads."""

    def change(route: Route) -> None:
        answer = route.fetch()
        status = answer.json()
        route.fulfill(response=answer, json={**status, "models": changed(status["models"])})

    page.route("**/llamasup/v1/status", change)
    page.reload()


def focus_on(page: Page, wanted: Any) -> None:
    """Press Tab until this element has the focus, as a user without a mouse does."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"Tab does not reach {wanted}")
