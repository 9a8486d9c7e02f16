"""Very many models and requests, config files with mistakes, and a llamasup without a console."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.extended.browser.conftest import Console, Serve, card, focus_on, show, sign_in
from tests.kit.patience import PATIENCE_S

pytestmark = pytest.mark.one_runtime

NewContext = Callable[..., BrowserContext]
MODELS = 1000
REQUESTS = 10_000
KEPT = 200
"""Finished requests that llamasup remembers and the page shows."""


@pytest.fixture
def few(serve: Serve) -> Console:
    """Its file allows the console to add models."""
    return serve({"tiny": {}}, http={"api_config": "full"})


def editor(page: Page) -> Page:
    show(page, "Config")
    return page


def write(page: Page, text: str) -> None:
    page.get_by_label("Config file").fill(text)


def test_thousand_models_are_shown_in_parts_and_found_by_name(
    serve: Serve, runtime: str, new_context: NewContext
) -> None:
    # Without the script around the runtime, which is asked again for each model what it can do.
    console = serve({f"model-{number}": {} for number in range(MODELS)}, runtime=runtime)
    page = sign_in(new_context(), console)
    expect(page.get_by_text(f"{MODELS:,} of {MODELS:,} models")).to_be_visible()
    expect(page.locator(".card")).to_have_count(100)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".card")).to_have_count(200)
    page.get_by_label("Find a model").fill("MODEL-777")
    expect(page.locator(".card")).to_have_count(1)
    expect(card(page, "model-777").locator(".state")).to_have_text("stopped")
    for name in ("Plan", "Playground", "Logs"):
        show(page, name)
        page.get_by_role("combobox", name="Model", exact=True).select_option("model-777")


def test_ten_thousand_finished_requests_leave_a_short_table(few: Console, new_context: NewContext) -> None:
    page = sign_in(new_context(), few)
    show(page, "Requests")
    ask_often(few.url, REQUESTS)
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(KEPT)
    page.reload()
    expect(rows).to_have_count(KEPT)


def ask_often(url: str, times: int) -> None:
    """The cheapest requests to a model, one after the other on one connection."""
    body = json.dumps({"model": "tiny", "content": "a"}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with (
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), PATIENCE_S) as client,
        client.makefile("rb") as answers,
    ):
        for _ in range(times):
            client.sendall(request)
            length = 0
            while (line := answers.readline().lower()) != b"\r\n":
                assert line, "the connection was closed"
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            answers.read(length)


def test_config_with_a_mistake_is_not_applied(few: Console, new_context: NewContext) -> None:
    page = editor(sign_in(new_context(), few))
    before = few.config.read_text()
    write(page, before.replace('"models"', '"modles"'))
    expect(page.get_by_role("main")).to_contain_text("modles")
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()
    write(page, "models: [")
    expect(page.get_by_text("Line ")).to_be_visible()
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()
    assert few.config.read_text() == before


def test_added_model_is_previewed_and_applied(few: Console, new_context: NewContext) -> None:
    """With the keyboard alone."""
    page = editor(sign_in(new_context(), few))
    config = json.loads(few.config.read_text())
    added = few.config.with_name("added.gguf")
    added.hardlink_to(few.config.with_name("chat"))
    config["models"]["added"] = {"path": str(added)}
    focus_on(page, page.get_by_label("Config file"))
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(json.dumps(config))
    expect(page.get_by_text("Added models: added")).to_be_visible()
    focus_on(page, page.get_by_role("button", name="Apply"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Applied")).to_be_visible()
    assert json.loads(few.config.read_text()) == config
    show(page, "Models")
    expect(card(page, "added").locator(".state")).to_have_text("stopped")


def test_second_console_does_not_overwrite_the_change_of_the_first(
    few: Console, new_context: NewContext
) -> None:
    first, second = (editor(sign_in(new_context(), few)) for _ in range(2))
    text = few.config.read_text()
    for page, comment in ((first, "# of the first"), (second, "# of the second")):
        write(page, f"{comment}\n{text}")
        expect(page.get_by_role("button", name="Apply")).to_be_enabled()
    first.get_by_role("button", name="Apply").click()
    expect(first.get_by_role("heading", name="Applied")).to_be_visible()
    second.get_by_role("button", name="Apply").click()
    expect(second.get_by_role("alert")).to_be_visible()
    expect(second.get_by_label("Config file")).to_have_value(f"# of the second\n{text}")
    assert few.config.read_text().startswith("# of the first\n")


def test_llamasup_without_a_console_serves_no_page(serve: Serve, new_context: NewContext) -> None:
    console = serve({"tiny": {}}, "--no-ui")
    page = new_context().new_page()
    for path in ("/llamasup/", "/llamasup/assets/console.js"):
        answer = page.request.get(console.url + path)
        assert answer.status == 403
        assert answer.json()["error"]["cause"] == "control_closed"


def test_user_signs_in_loads_chats_plans_and_edits_the_config(serve: Serve, new_context: NewContext) -> None:
    """One visit from `llamasup ui --print` to a changed config, as a user makes it."""
    console = serve({"first": {"ctx_size": 1024, "parallel": 2}, "second": {"ctx_size": 1024, "replicas": 2}})
    page = sign_in(new_context(), console)
    for model in ("first", "second"):
        page.get_by_role("button", name=f"Load {model}", exact=True).click()
        expect(card(page, model).locator("h2 .state")).to_have_text("ready")
    expect(card(page, "second")).to_contain_text("2 of 2 ready")
    expect(page.get_by_role("list", name="Replicas of second").get_by_role("listitem")).to_have_count(2)
    page.get_by_role("button", name="Unload second", exact=True).click()
    expect(card(page, "second").locator("h2 .state")).to_have_text("stopped")

    show(page, "Playground")
    page.get_by_label("System prompt").fill("Answer in one word.")
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("region", name="Answers of first")).to_contain_text("8 tokens")

    show(page, "Plan")
    page.get_by_label("KV type").select_option("q8_0")
    expect(page.locator("pre.command")).to_contain_text("--cache-type-k q8_0")
    expect(page.get_by_role("row", name=re.compile("^RAM "))).to_contain_text("yes")

    show(page, "Config")
    before = console.config.read_text()
    write(page, before.replace("ctx_size", "ctx_sise", 1))
    expect(page.get_by_text("Line ")).to_contain_text("ctx_size")
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()
    write(page, before.replace("1024", "768", 1))
    expect(page.get_by_text("Models that get a new process: first")).to_be_visible()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("heading", name="Applied")).to_be_visible()
    assert console.config.read_text() != before
    show(page, "Models")
    expect(card(page, "first")).to_contain_text("768 tokens")
