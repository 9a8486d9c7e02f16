"""The pages of the console and its changes, in a real Chromium, with a real llama-server."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.extended.browser.conftest import (
    ADMIN,
    CONTENT,
    PATIENCE_MS,
    Console,
    Serve,
    card,
    focus_on,
    show,
    sign_in,
    with_models,
)
from tests.kit.patience import PATIENCE_S, eventually

NewContext = Callable[..., BrowserContext]
PAGES = ("Models", "Memory", "Requests", "Plan", "Playground", "Batches", "Logs", "Usage", "Config")
HTML_NAME = "<img src=x onerror=document.title=1>"
CHAT, OTHER, SLEEPER = "tiny-chat", "tiny-other", "org/sleeper:F32"
BY_KEYBOARD = "tiny-keyboard"


@pytest.fixture(scope="module")
def console(serve: Serve) -> Console:
    small = {"ctx_size": 1024, "parallel": 1}
    served = {
        CHAT: {"preload": True, "aliases": ["gpt-4o-mini"], **small},
        OTHER: small,
        SLEEPER: small,
        BY_KEYBOARD: small,
        "embedder": {"content": "encoder"},
        "ranker": {"content": "ranker"},
    }
    return serve(served, keys=f"sk-for-chats\n{ADMIN} name=admin rights=control\n")


@pytest.fixture(scope="module")
def state(console: Console, browser: Any) -> Any:
    """The storage of a browser that is signed in."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    sign_in(context, console)
    storage = context.storage_state()
    context.close()
    assert storage["cookies"] == []
    return storage


@pytest.fixture
def page(console: Console, new_context: NewContext, state: Any) -> Page:
    page = new_context(storage_state=state).new_page()
    page.goto(console.page_url)
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    return page


# --- all pages


@pytest.mark.one_runtime
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_page_passes_the_rules_of_axe(
    console: Console, new_context: NewContext, state: Any, colours: str
) -> None:
    page = new_context(storage_state=state, color_scheme=colours).new_page()
    page.goto(console.page_url)
    script = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
    page.evaluate(script)
    found = []
    for name in PAGES:
        show(page, name)
        for violation in page.evaluate("axe.run()")["violations"]:
            found += [(name, violation["id"], node["html"][:200]) for node in violation["nodes"]]
    assert found == []


@pytest.mark.one_runtime
def test_sign_in_page_passes_the_rules_of_axe(console: Console, new_context: NewContext) -> None:
    page = new_context().new_page()
    page.goto(console.page_url)
    expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    assert [(violation["id"], violation["nodes"]) for violation in found] == []


@pytest.mark.one_runtime
def test_pages_fit_a_screen_of_400_pixels(console: Console, new_context: NewContext, state: Any) -> None:
    page = new_context(storage_state=state, viewport={"width": 400, "height": 800}).new_page()
    page.goto(console.page_url)
    for name in PAGES:
        show(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, name


@pytest.mark.one_runtime
def test_dark_colours_are_dark(console: Console, new_context: NewContext, state: Any) -> None:
    lightness = {}
    for colours in ("light", "dark"):
        page = new_context(storage_state=state, color_scheme=colours).new_page()
        page.goto(console.page_url)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness[colours] = sum(int(number) for number in re.findall(r"\d+", colour)[:3])
    assert lightness["dark"] < 200 < 600 < lightness["light"]


LIGHTNESS = """canvas => {
    const { width, height } = canvas;
    const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, width, height);
    let sum = 0, seen = 0;
    for (let at = 0; at < data.length; at += 4) {
        if (data[at + 3] === 255) { sum += data[at] + data[at + 1] + data[at + 2]; seen += 1; }
    }
    return seen && sum / seen;
}"""
"""Of the opaque pixels of a chart: its axes, its grid and its line. 0 before it is drawn, at most 765."""


@pytest.mark.one_runtime
def test_charts_follow_a_change_of_the_colours(page: Page) -> None:
    chart = page.locator("canvas").first
    for colours, low, high in (("light", 440, 765), ("dark", 1, 440), ("light", 440, 765)):
        page.emulate_media(color_scheme=colours)  # type: ignore[arg-type]
        eventually(lambda: low < chart.evaluate(LIGHTNESS) < high)  # noqa: B023


@pytest.mark.one_runtime
def test_page_shows_nothing_of_the_page_before_while_it_is_loaded(page: Page) -> None:
    held: list[Route] = []
    page.route("**/pages/memory.js", lambda route: held.append(route))
    page.get_by_role("navigation").get_by_role("link", name="Memory").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Memory")
    expect(page.get_by_text("Loading…")).to_be_visible()
    expect(page.locator(".card")).to_have_count(0)
    eventually(lambda: page.title() and held)  # Playwright passes on the request in a later call
    held[0].continue_()
    expect(page.locator(CONTENT["Memory"])).to_be_visible()


@pytest.mark.one_runtime
def test_page_that_cannot_be_loaded_says_so(console: Console, browser: Any, state: Any) -> None:
    context = browser.new_context(storage_state=state)  # not watched: the browser writes of the lost file
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.route("**/pages/memory.js", lambda route: route.abort())
    page.goto(f"{console.page_url}#memory")
    expect(page.get_by_role("alert")).to_contain_text("This page could not be loaded.")
    show(page, "Requests")
    context.close()


# --- signing in


@pytest.mark.one_runtime
def test_token_signs_in_once_and_leaves_the_address_bar(console: Console, new_context: NewContext) -> None:
    address = console.signing_url()
    first, second = new_context().new_page(), new_context().new_page()
    first.goto(address)
    expect(first.get_by_role("heading", level=1)).to_have_text("Models")
    assert first.url == console.page_url
    second.goto(address)
    expect(second.get_by_role("alert")).to_contain_text("was used already, or is older than 60 s")
    expect(second.get_by_role("alert")).to_contain_text("llamasup ui")


@pytest.mark.one_runtime
def test_file_that_the_browser_opens_signs_it_in(console: Console, new_context: NewContext) -> None:
    address = console.sign_in_file()
    assert address.startswith("file://")
    assert "token" not in address
    page = new_context().new_page()
    page.goto(address)
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")
    assert page.url == console.page_url


@pytest.mark.one_runtime
def test_key_signs_in_with_the_keyboard_alone(console: Console, new_context: NewContext) -> None:
    page = new_context().new_page()
    page.goto(console.page_url)
    expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
    for key, problem in (
        ("wrong", "The key is unknown"),
        ("sk-for-chats", "does not have the right `control`"),
    ):
        focus_on(page, page.get_by_label("API key"))
        page.keyboard.press("Control+a")
        page.keyboard.type(key)
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text(problem)
    page.keyboard.press("Control+a")
    page.keyboard.type(ADMIN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")


@pytest.mark.one_runtime
def test_sign_out_ends_the_session_of_all_tabs(console: Console, new_context: NewContext) -> None:
    context = new_context()
    page = sign_in(context, console)
    sleeping = context.new_page()
    sleeping.goto(console.page_url)
    expect(sleeping.get_by_text("live", exact=True)).to_be_visible()
    hide(sleeping, hidden=True)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
    hide(sleeping, hidden=False)  # the tab awakes
    expect(sleeping.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
    page.goto(console.page_url)
    expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()


# --- models


def test_model_is_loaded_restarted_and_unloaded(page: Page) -> None:
    model = card(page, SLEEPER)
    for button, state in (("Load", "ready"), ("Restart", "ready"), ("Unload", "stopped")):
        with page.expect_response(lambda answer: f"/{button.lower()}?" in answer.url) as answer:  # noqa: B023
            model.get_by_role("button", name=f"{button} {SLEEPER}", exact=True).click()
        assert answer.value.ok
        expect(model.locator(".state")).to_have_text(state)
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.one_runtime
@pytest.mark.parametrize(
    ("state_of_model", "buttons"),
    [
        ("stopped", {"Load"}),
        ("failed", {"Load"}),
        ("waiting", {"Unload"}),
        ("starting", {"Unload", "Restart"}),
        ("ready", {"Unload", "Restart"}),
        ("draining", {"Unload", "Restart"}),
        ("stopping", {"Unload"}),  # a restart passes through it
        ("broken", set()),
    ],
)
def test_state_of_a_model_decides_which_buttons_work(
    page: Page, state_of_model: str, buttons: set[str]
) -> None:
    with_models(page, lambda models: [{**model, "state": state_of_model} for model in models])
    model = card(page, SLEEPER)
    expect(model.locator(".state")).to_have_text(state_of_model)
    for button in ("Load", "Unload", "Restart"):
        named = model.get_by_role("button", name=f"{button} {SLEEPER}", exact=True)
        expect(named).to_be_enabled(enabled=button in buttons)


@pytest.mark.one_runtime
def test_late_answer_does_not_replace_a_newer_one(page: Page) -> None:
    expect(card(page, SLEEPER)).to_be_visible()
    shown = page.evaluate(
        """async () => {
            const store = await import("/llamasup/assets/store.js");
            const { status } = store.current();
            const answer = (state) => {
                const models = status.models.map((model) => ({ ...model, state }));
                return new Response(JSON.stringify({ ...status, models }));
            };
            const asked = [];
            const real = window.fetch;
            window.fetch = (path, options) => {
                if (!path.endsWith("/status")) return real(path, options);
                return new Promise((resolve) => asked.push(resolve));
            };
            const [older, newer] = [store.refreshStatus(), store.refreshStatus()];
            asked[1](answer("ready"));
            await newer;
            asked[0](answer("stopping"));
            await older;
            return store.current().status.models.map((model) => model.state);
        }"""
    )
    assert set(shown) == {"ready"}


@pytest.mark.one_runtime
def test_models_are_loaded_with_the_keyboard_alone(page: Page) -> None:
    button = page.get_by_role("button", name=f"Load {BY_KEYBOARD}", exact=True)
    focus_on(page, button)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    expect(card(page, BY_KEYBOARD).locator(".state")).to_have_text("ready")
    focus_on(page, page.get_by_role("button", name=f"Unload {BY_KEYBOARD}", exact=True))
    page.keyboard.press("Space")
    expect(card(page, BY_KEYBOARD).locator(".state")).to_have_text("stopped")


@pytest.mark.one_runtime
def test_pages_are_reached_with_the_keyboard_alone(page: Page) -> None:
    for name in PAGES:
        focus_on(page, page.get_by_role("navigation").get_by_role("link", name=name, exact=True))
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
    focus_on(page, page.get_by_role("link", name="Skip to content"))
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


def test_why_says_the_reason_and_the_last_decision(page: Page) -> None:
    model = card(page, CHAT)
    button = model.get_by_role("button", name=f"Why is {CHAT} ready?")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    why = model.locator(".why")
    expect(why).to_contain_text(f"{CHAT} is loaded")
    expect(why.get_by_role("listitem").first).to_contain_text("loaded")
    button.click()
    expect(why).to_have_count(0)


@pytest.mark.one_runtime
def test_two_consoles_change_the_same_model(
    page: Page, console: Console, new_context: NewContext, state: Any
) -> None:
    other = new_context(storage_state=state).new_page()
    other.goto(console.page_url)
    one, two = card(page, SLEEPER), card(other, SLEEPER)
    expect(two.locator(".state")).to_have_text("stopped")
    one.get_by_role("button", name=f"Load {SLEEPER}", exact=True).click()
    for both in (one, two):
        expect(both.locator(".state")).to_have_text("ready")
    two.get_by_role("button", name=f"Unload {SLEEPER}", exact=True).click()
    for both in (one, two):
        expect(both.locator(".state")).to_have_text("stopped")
    for both in (one, two):  # before either knows of the other's
        both.get_by_role("button", name=f"Load {SLEEPER}", exact=True).dispatch_event("click")
    for both in (one, two):
        expect(both.locator(".state")).to_have_text("ready")
        expect(both.get_by_role("alert")).to_have_count(0)
    one.get_by_role("button", name=f"Unload {SLEEPER}", exact=True).click()
    expect(two.locator(".state")).to_have_text("stopped")


@pytest.mark.one_runtime
def test_name_with_html_is_shown_as_text_on_every_page(console: Console, page: Page) -> None:
    """No config and no folder may have such a name: here the answer of llamasup is changed."""

    with_models(page, lambda models: [*models, {**models[0], "id": HTML_NAME, "aliases": [f"{HTML_NAME}2"]}])
    expect(card(page, HTML_NAME).get_by_role("heading")).to_contain_text(HTML_NAME)
    for name in PAGES:
        show(page, name)
        if name in ("Plan", "Playground", "Logs"):
            expect(page.get_by_role("combobox", name="Model", exact=True)).to_contain_text(HTML_NAME)
        expect(page).to_have_title(f"{name} · llamasup")
        assert page.locator("img").count() == 0


# --- requests, memory, plan, playground, logs


def test_chat_is_answered_side_by_side_and_listed(page: Page) -> None:
    """With the keyboard alone."""
    show(page, "Playground")
    focus_on(page, second := page.get_by_label("Second model"))
    for _ in second.get_by_role("option").all():
        if second.input_value() != OTHER:  # typing its name would depend on the time between two keys
            page.keyboard.press("ArrowDown")
    expect(second).to_have_value(OTHER)
    focus_on(page, limit := page.get_by_label("Max tokens"))
    page.keyboard.type("8")
    page.evaluate("import('/llamasup/assets/store.js').then(store => store.update({}))")  # as news do
    expect(limit).to_have_value("8")
    focus_on(page, page.get_by_label("Message"))
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    for model in (CHAT, OTHER):
        said = page.get_by_role("region", name=f"Answers of {model}").locator(".assistant")
        expect(said).to_contain_text(re.compile(r"first token after .*, 8 tokens"))
        expect(said.get_by_role("alert")).to_have_count(0)
    show(page, "Requests")
    rows = page.get_by_role("row").filter(has_text="/v1/chat/completions")
    expect(rows.filter(has_text=OTHER).filter(has_text="200").first).to_be_visible()


@pytest.mark.one_runtime
def test_playground_embeds_and_ranks(page: Page) -> None:
    show(page, "Playground")
    page.get_by_role("button", name="Embeddings", exact=True).click()
    page.get_by_role("combobox", name="Model", exact=True).select_option("embedder")
    page.get_by_label("Text").fill("hello")
    page.get_by_role("main").locator("form").get_by_role("button").click()
    expect(page.get_by_text(re.compile(r"\d+ numbers:"))).to_be_visible()
    page.get_by_role("button", name="Rerank", exact=True).click()
    page.get_by_role("combobox", name="Model", exact=True).select_option("ranker")
    page.get_by_label("Query").fill("hello")
    page.get_by_label("Documents").fill("one\n\ntwo")
    page.get_by_role("main").locator("form").get_by_role("button").click()
    expect(page.get_by_role("listitem")).to_have_count(2)


@pytest.mark.one_runtime
def test_request_in_flight_is_listed_and_cancelled(page: Page, console: Console) -> None:
    show(page, "Requests")
    address = urlsplit(console.url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        "Authorization: Bearer sk-for-chats\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\nX-Request-Id: of-the-test\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), PATIENCE_S) as client:
        client.sendall(head.encode() + b"{")  # the rest never arrives, so it stays in flight
        row = page.get_by_role("row").filter(has_text="sending")
        expect(row).to_contain_text("/v1/chat/completions")
        client.sendall(b" ")  # a body that makes no progress is refused after a while
        focus_on(page, page.get_by_role("button", name="Cancel request of-the-test"))
        page.keyboard.press("Enter")
        expect(row).to_have_count(0)
        assert client.recv(100).startswith(b"HTTP/1.1 499 ")


@pytest.mark.one_runtime
def test_memory_of_a_loaded_model_is_predicted_and_measured(page: Page) -> None:
    show(page, "Memory")
    row = page.get_by_role("row").filter(has_text=CHAT).first
    expect(row).to_contain_text("ready")
    expect(row).to_contain_text("MiB")


@pytest.mark.one_runtime
def test_plan_changes_with_a_slider_and_starts_nothing(page: Page) -> None:
    show(page, "Plan")
    page.get_by_role("combobox", name="Model", exact=True).select_option(SLEEPER)
    expect(page).to_have_url(re.compile("#plan/"))
    flags = page.locator("pre.command")
    expect(flags).to_contain_text("2.gguf")
    expect(flags).to_contain_text("--parallel 1")
    slots = page.get_by_role("slider", name="Slots")
    slots.focus()
    page.keyboard.press("ArrowRight")
    expect(flags).to_contain_text("--parallel 5")
    show(page, "Models")
    expect(card(page, SLEEPER).locator(".state")).to_have_text("stopped")


@pytest.mark.one_runtime
def test_file_that_is_not_served_is_planned(page: Page, console: Console) -> None:
    show(page, "Plan")
    file = console.config.with_name("chat")
    page.get_by_label("Or a GGUF file").fill(str(file))
    page.keyboard.press("Enter")
    expect(page.locator("pre.command")).to_contain_text(f"--model {file}")
    page.get_by_label("Or a GGUF file").fill(f"{file}.gguf")
    page.get_by_role("button", name="Show plan").click()
    expect(page.get_by_role("alert")).to_contain_text(f"{file}.gguf")


def test_log_shows_neither_escapes_nor_html(page: Page) -> None:
    card(page, CHAT).get_by_role("link", name=f"Log of {CHAT}").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text("red  \N{REPLACEMENT CHARACTER} <b>bold</b>")
    assert "\x1b" not in log.inner_text()
    assert "[31m" not in log.inner_text()
    assert log.locator("b").count() == 0
    page.get_by_role("combobox", name="Model", exact=True).select_option("llamasup itself")
    expect(page.get_by_role("log", name="Log of llamasup itself")).to_contain_text(" info: ")


# --- usage


@pytest.mark.one_runtime
def test_usage_says_so_where_it_is_not_counted(page: Page) -> None:
    """As an older llamasup answers, whose pages a browser may still have."""
    error = {"message": "GET /llamasup/v1/usage: no such path", "cause": "no_such_route"}
    page.route("**/v1/usage?*", lambda route: route.fulfill(status=404, json={"error": error}))
    show(page, "Usage")
    expect(page.get_by_text("This llamasup does not have this function.")).to_be_visible()


@pytest.mark.one_runtime
def test_usage_is_shown_by_day_and_by_model(page: Page) -> None:
    counted = {
        "requests": 3, "errors": 1, "tokens_prompt": 1000, "tokens_cached": 10,
        "tokens_completion": 2_000_000, "slot_s": 4.5, "energy_j": 7200,
    }  # fmt: skip

    def answer(route: Route) -> None:
        by = route.request.url.partition("by=")[2].partition("&")[0]
        of = {"model": HTML_NAME, "key": "ann", "day": "2026-08-01"}[by]
        rows = [{by: of, **counted}]
        route.fulfill(json={"by": [by], "since": "2026-08-01", "problem": None, "rows": rows})

    page.route("**/v1/usage?*", answer)
    show(page, "Usage")
    expect(page.locator("canvas")).to_have_count(2)
    expect(page.get_by_role("row").filter(has_text=HTML_NAME)).to_contain_text("2,000,000")
    expect(page.get_by_role("row").filter(has_text=HTML_NAME)).to_contain_text("2.0 Wh")
    page.get_by_label("By").select_option("key")
    expect(page.get_by_role("row").filter(has_text="ann")).to_be_visible()
    assert page.locator("img").count() == 0


# --- a tab that sleeps


@pytest.mark.one_runtime
def test_hidden_tab_asks_for_nothing_and_is_current_again_when_shown(
    console: Console, new_context: NewContext, state: Any, page: Page
) -> None:
    sleeping = new_context(storage_state=state).new_page()
    sleeping.clock.install()
    sleeping.goto(console.page_url)
    expect(sleeping.get_by_text("live", exact=True)).to_be_visible()
    expect(sleeping.locator("canvas")).to_have_count(4)  # the charts, whose library is loaded last
    hide(sleeping, hidden=True)
    asked: list[str] = []
    sleeping.on("request", lambda request: asked.append(request.url))
    sleeping.clock.run_for("24:00:00")
    card(page, SLEEPER).get_by_role("button", name=f"Load {SLEEPER}", exact=True).click()
    expect(card(page, SLEEPER).locator(".state")).to_have_text("ready")
    assert asked == []
    hide(sleeping, hidden=False)
    expect(card(sleeping, SLEEPER).locator(".state")).to_have_text("ready")
    card(page, SLEEPER).get_by_role("button", name=f"Unload {SLEEPER}", exact=True).click()
    expect(card(page, SLEEPER).locator(".state")).to_have_text("stopped")


# --- pages of other sites


@pytest.mark.one_runtime
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["same site, other port", "another site"])
def test_page_of_another_site_changes_nothing(
    console: Console, new_context: NewContext, state: Any, page: Page, host: str
) -> None:
    other = new_context(storage_state=state).new_page()
    target = f"{console.url}/llamasup/v1/models/{CHAT}/unload"
    form = f'<!doctype html><title>x</title><form method="post" action="{target}"><button>Win</button></form>'
    other.route("**/evil", lambda route: route.fulfill(body=form, content_type="text/html"))
    other.goto(f"http://{host}:9999/evil")
    with other.expect_navigation() as answer:
        other.get_by_role("button", name="Win").click()
    assert answer.value.status == 403
    expect(card(page, CHAT).locator(".state")).to_have_text("ready")


def hide(page: Page, *, hidden: bool) -> None:
    """What a browser does with a tab in the background."""
    page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )
