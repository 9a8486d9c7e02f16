"""What the pages do with news that come while a user types, reads or waits, and with failures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Response, Route, expect

from tests.e2e.driver import started
from tests.extended.browser.conftest import ADMIN, CONTENT, Console, Serve, card, focus_on, show, sign_in
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port
from tests.kit.runtimes import wrapped_runtime
from tests.real.remains import folders_of

pytestmark = pytest.mark.one_runtime

NewContext = Callable[..., BrowserContext]
NEWS = "import('/llamasup/assets/store.js').then(store => store.update({}))"
"""As each event from llamasup does: it renders the pages again."""


@pytest.fixture(scope="module")
def console(serve: Serve) -> Console:
    small = {"ctx_size": 1024, "parallel": 1}
    return serve({"first": small, "second": small})


@pytest.fixture
def page(console: Console, new_context: NewContext) -> Page:
    return sign_in(new_context(), console)


def answer_of(route: Route, *deltas: dict[str, str]) -> None:
    """Answer a chat with these deltas, as llama-server streams them."""
    chunks = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    body = "".join(f"data: {chunk}\n\n" for chunk in (*chunks, "[DONE]"))
    route.fulfill(content_type="text/event-stream", body=body)


# --- signing in


def test_new_address_in_an_open_tab_signs_it_in_again(console: Console, page: Page) -> None:
    with page.expect_response(is_sign_in) as answer:
        page.goto(console.signing_url())
    assert answer.value.ok
    expect(page).to_have_url(console.page_url)
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def is_sign_in(answer: Response) -> bool:
    return answer.url.endswith("/console/session") and answer.request.method == "POST"


def test_refused_token_keeps_a_session_that_the_browser_has(console: Console, page: Page) -> None:
    page.goto(f"{console.page_url}#memory")
    with page.expect_response(is_sign_in) as answer:
        page.goto(f"{console.page_url}#token=wrong")
    assert answer.value.status == 401
    expect(page).to_have_url(console.page_url)
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def test_refused_token_is_shown_on_an_open_page_for_signing_in(
    console: Console, new_context: NewContext
) -> None:
    page = new_context().new_page()
    page.goto(console.page_url)
    expect(page.get_by_role("alert")).to_contain_text("not signed in")
    page.goto(f"{console.page_url}#token=wrong")
    expect(page.get_by_role("alert")).to_contain_text("The token is unknown")
    expect(page).to_have_url(console.page_url)


def test_page_without_keys_asks_for_no_key(console: Console, new_context: NewContext) -> None:
    page = new_context().new_page()
    page.goto(console.page_url)
    expect(page.get_by_role("alert")).to_contain_text("llamasup ui")
    expect(page.get_by_label("API key")).to_have_count(0)


def test_page_asks_to_sign_in_when_its_session_ends(serve: Serve, new_context: NewContext) -> None:
    console = serve({"tiny": {}}, keys=f"{ADMIN} name=admin rights=control\n")
    page = new_context().new_page()
    page.goto(console.page_url)
    page.get_by_label("API key").fill(ADMIN)
    page.keyboard.press("Enter")
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    console.config.with_name("keys").write_text("sk-another name=other rights=control\n")
    expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("not signed in")


def test_open_page_notices_the_end_and_the_next_start(serve: Serve, new_context: NewContext) -> None:
    console = serve({"tiny": {}}, listen=f"127.0.0.1:{free_port()}")
    page = sign_in(new_context(), console)
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.locator("canvas")).to_have_count(4)  # the charts, whose library is loaded last
    assert console.running.stop() == 0
    expect(page.get_by_text("reconnecting")).to_be_visible()
    expect(page.get_by_role("alert").filter(has_text="llamasup does not answer").first).to_be_visible()
    expect(page.get_by_text("The states shown are not current.")).to_be_visible()
    colours = page.locator(".state, .note").evaluate_all(
        "all => all.map(each => getComputedStyle(each).color)"
    )
    assert len(set(colours)) == 1  # no state is green
    with started("serve", "--config", str(console.config), env=console.env) as again:
        again.wait_for("ready")
        # Sessions end with llamasup.
        expect(page.get_by_role("heading", name="Sign in to llamasup")).to_be_visible()
        page.goto(console.signing_url())
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        expect(page.locator("canvas")).to_have_count(4)
        assert again.stop() == 0


# --- models and logs


def test_many_loads_block_neither_the_pages_nor_end_with_their_tab(
    serve: Serve, runtime: str, tmp_path: Path, new_context: NewContext
) -> None:
    """A browser opens six connections to a host."""
    gate = tmp_path / "gate"
    waits = f'case "$*" in *--model*) until [ -e {gate} ]; do sleep 0.1; done ;; esac'
    names = [f"model-{number}" for number in range(7)]
    console = serve(
        {name: {"ctx_size": 256, "parallel": 1} for name in names},
        runtime=wrapped_runtime(tmp_path, runtime, waits),
    )
    page = sign_in(new_context(), console)
    for name in names:
        page.get_by_role("button", name=f"Load {name}", exact=True).click()
    show(page, "Memory")
    show(page, "Models")
    page.reload()
    for name in names:
        expect(card(page, name).locator(".state")).not_to_have_text("stopped")
    gate.touch()
    for name in names:
        expect(card(page, name).locator(".state")).to_have_text("ready")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_failed_load_shows_its_cause(
    serve: Serve, runtime: str, tmp_path: Path, new_context: NewContext
) -> None:
    fails = 'case "$*" in *--model*) echo "error: no such luck" >&2; exit 3 ;; esac'
    console = serve({"tiny": {"ctx_size": 256}}, runtime=wrapped_runtime(tmp_path, runtime, fails))
    page = sign_in(new_context(), console)
    page.get_by_role("button", name="Load tiny", exact=True).click()
    expect(card(page, "tiny").locator(".state")).to_have_text("failed")
    expect(card(page, "tiny").get_by_role("alert")).to_be_visible()


def test_log_stays_with_its_model_when_another_becomes_ready(page: Page) -> None:
    show(page, "Logs")
    choice = page.get_by_role("combobox", name="Model", exact=True)
    shown = choice.input_value()
    page.evaluate(
        """shown => import('/llamasup/assets/store.js').then(store => {
            const { status } = store.current();
            const other = known => ({ ...known, state: known.id === shown ? "failed" : "ready" });
            store.update({ status: { ...status, models: status.models.map(other) } });
        })""",
        shown,
    )
    expect(choice).to_have_value(shown)
    expect(page.get_by_role("log", name=f"Log of {shown}")).to_be_visible()


def test_escape_that_does_not_end_hides_no_other_line(page: Page) -> None:
    cases = {
        "\x1b[31mred\x1b[0m": "red",
        "\x1b]0;title\x07rest": "rest",
        "\x1b]0;title\x1b\\rest": "rest",
        "\x1b]0;cut off\nrest": "\nrest",
        "\x1bPcut off\nrest": "\nrest",
        "\x1b(B\x1b=\x1b7text\x1b[": "text",
        "a\r\nb\tc\rd": "a\nb\tc\ufffdd",
    }
    for text, shown in cases.items():
        found = page.evaluate(
            "text => import('/llamasup/assets/format.js').then(({ plainText }) => plainText(text))", text
        )
        assert found == shown


# --- requests and memory


def test_filter_shows_only_slow_requests(page: Page) -> None:
    with_requests(page, request("slow", 10), request("fast", 9.9))
    show(page, "Requests")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    page.get_by_label("Only requests of").check()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("/slow")


def request(name: str, duration_s: float) -> dict[str, Any]:
    """One that has ended, as the control API lists it."""
    facts = {"request_id": name, "path": f"/{name}", "duration_s": duration_s, "model": "first"}
    return {**facts, "time": "2026-03-01T00:00:00Z", "status": 200, "outcome": "ok"}


def test_narrow_window_shows_all_pages_and_all_cells_of_a_table(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    with_requests(page, request("slow", 10))
    for name in CONTENT:
        show(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        places = page.locator("nav a, td, th[scope=row]").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect()).map(({ left, right }) => [left, right])"
        )
        assert [place for place in places if place[0] < 0 or place[1] > 390] == [], name
    show(page, "Requests")
    titles = page.locator("tbody td").evaluate_all(
        "all => all.map(each => getComputedStyle(each, '::before').content)"
    )
    assert {'"Client"', '"Status"', '"Outcome"', '"Speed"'} < set(titles)


def with_requests(page: Page, *ended: dict[str, Any]) -> None:
    """Reload the page, which finds these requests."""
    found = {"live": [], "ended": ended, "ended_total": len(ended)}
    page.route("**/v1/requests?*", lambda route: route.fulfill(json=found))
    page.reload()


def test_list_of_requests_that_is_older_than_an_event_replaces_nothing(page: Page, console: Console) -> None:
    held: list[Route] = []
    address = page.url
    page.goto("about:blank")  # otherwise the first list that is held may be one that this page asked for
    page.route("**/v1/requests?*", lambda route: held.append(route))
    page.goto(address)
    show(page, "Requests")
    eventually(lambda: page.title() and held)
    httpx.post(f"{console.url}/tokenize", json={"model": "first", "content": "a"}, timeout=PATIENCE_S)
    expect(page.get_by_role("cell", name="/tokenize").first).to_be_visible()
    held[0].fulfill(json={"live": [request("gone", 0)], "ended": [request("before", 1)], "ended_total": 1})
    expect(page.get_by_role("cell", name="/before")).to_be_visible()
    expect(page.locator("tbody tr").first).to_contain_text("/tokenize")
    expect(page.get_by_text("No request is in flight.")).to_be_visible()


GIB = 1 << 30


def bars_of(page: Page, **device: Any) -> dict[str, list[tuple[str, float]]]:
    bars = page.evaluate(
        "device => import('/llamasup/assets/pages/memory.js').then(({ barsOf }) => barsOf(device))", device
    )
    return {name: [(part["kind"], part["width"]) for part in parts] for name, parts in bars.items()}


def test_memory_of_other_programs_is_not_drawn_as_free(page: Page) -> None:
    model = {
        "id": "m",
        "measured_bytes": 3 * GIB,
        "predicted": {"weights_bytes": 2 * GIB, "kv_bytes": 2 * GIB, "total_bytes": 4 * GIB},
    }
    assert bars_of(page, total_bytes=10 * GIB, free_bytes=2 * GIB, models=[model]) == {
        "predicted": [("weights", 200), ("kv", 200), ("others", 500)],
        "measured": [("measured", 300), ("others", 500)],
    }
    model["measured_bytes"] = None
    assert bars_of(page, total_bytes=10 * GIB, free_bytes=2 * GIB, models=[model])["measured"] == [
        ("others", 400)
    ]
    assert bars_of(page, total_bytes=10 * GIB, free_bytes=None, models=[]) == {
        "predicted": [],
        "measured": [],
    }
    # More is predicted than there is: the bar shows all of it.
    crowded = bars_of(page, total_bytes=2 * GIB, free_bytes=2 * GIB, models=[model])
    assert crowded["predicted"] == [("weights", 500), ("kv", 500)]


def test_memory_shows_predicted_above_measured_and_a_legend(page: Page) -> None:
    show(page, "Memory")
    for name in ("predicted", "measured"):
        expect(page.get_by_role("img", name=f"RAM: {name} memory by model")).to_be_visible()
    for name in ("Other programs", "Free", "Measured"):
        expect(page.locator(".legend")).to_contain_text(name)


# --- plans


def test_typed_path_stays_when_news_arrive(page: Page, console: Console) -> None:
    show(page, "Plan")
    field = page.get_by_label("Or a GGUF file")
    focus_on(page, field)
    file = str(console.config.with_name("chat"))
    page.keyboard.type(file)
    page.evaluate(NEWS)
    expect(field).to_have_value(file)
    focus_on(page, page.get_by_role("button", name="Show plan"))
    page.keyboard.press("Enter")
    expect(page.locator("pre.command")).to_contain_text(f"--model {file}")
    expect(field).to_have_value(file)


def test_slider_that_moves_asks_once_with_the_keyboard_alone(page: Page) -> None:
    page.clock.install()
    show(page, "Plan")
    flags = page.locator("pre.command")
    expect(flags).to_contain_text("--parallel 1")
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(urlsplit(sent.url).path))
    focus_on(page, page.get_by_role("slider", name="Slots"))
    page.clock.pause_at(page.evaluate("Date.now() + 60_000"))
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    expect(page.get_by_text("Slots: 9")).to_be_visible()
    assert "/llamasup/v1/plan" not in asked
    page.clock.run_for(1000)
    expect(flags).to_contain_text("--parallel 9")
    assert asked.count("/llamasup/v1/plan") == 1
    focus_on(page, page.get_by_role("button", name="Slots: as configured"))
    page.keyboard.press("Enter")
    page.clock.run_for(1000)
    expect(flags).to_contain_text("--parallel 1")


def test_each_detail_of_a_refused_plan_is_shown(page: Page) -> None:
    error = {"message": "2 invalid settings:", "remedy": "", "details": ["ctx_size: too small", "<b>: no"]}
    page.route("**/v1/plan", lambda route: route.fulfill(status=400, json={"error": error}))
    show_alert_of_plan(page)
    expect(page.get_by_role("alert").get_by_role("listitem")).to_have_text(["ctx_size: too small", "<b>: no"])


def show_alert_of_plan(page: Page) -> None:
    page.get_by_role("navigation").get_by_role("link", name="Plan", exact=True).click()
    expect(page.get_by_role("alert")).to_be_visible()


# --- playground


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_failed_question_and_reasoning_are_not_sent_again(page: Page) -> None:
    sent: list[list[tuple[str, str]]] = []

    def answer(route: Route) -> None:
        messages = json.loads(route.request.post_data or "")["messages"]
        sent.append([(message["role"], message["content"]) for message in messages])
        if len(sent) == 1:
            route.fulfill(status=503, json={"error": {"message": "Not now.", "remedy": ""}})
        else:
            answer_of(route, {"reasoning_content": "I think"}, {"content": f"answer {len(sent)}"})

    page.route("**/v1/chat/completions", answer)
    show(page, "Playground")
    say(page, "one")
    expect(page.get_by_role("alert")).to_contain_text("Not now.")
    say(page, "two")
    expect(page.get_by_text("answer 2")).to_be_visible()
    expect(page.get_by_text("I think")).to_be_visible()
    say(page, "three")
    expect(page.get_by_text("answer 3")).to_be_visible()
    assert sent == [
        [("user", "one")],
        [("user", "two")],
        [("user", "two"), ("assistant", "answer 2"), ("user", "three")],
    ]


def test_answer_is_stopped_and_the_talk_cleared(page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    show(page, "Playground")
    say(page, "Hello")
    talk = page.get_by_role("region", name="Answers of")
    expect(talk).to_contain_text("Hello")
    eventually(lambda: page.title() and held)
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_role("button", name="Clear").click()
    expect(talk).not_to_contain_text("Hello")


def test_older_answer_replaces_no_newer_one(page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/rerank", lambda route: held.append(route))
    show(page, "Playground")
    page.get_by_role("button", name="Rerank", exact=True).click()
    for documents in ("one\ntwo", "three\nfour"):
        page.get_by_label("Query").fill("hello")
        page.get_by_label("Documents").fill(documents)
        page.get_by_role("main").locator("form").get_by_role("button").click()
    eventually(lambda: page.title() and len(held) == 2)
    page.get_by_label("Documents").fill("five\nsix")
    for route, score in ((held[1], 0.2), (held[0], 0.1)):
        route.fulfill(json={"results": [{"index": 1, "relevance_score": score}]})
    expect(page.get_by_role("listitem")).to_have_text("0.2000: four")


# --- config


def test_text_that_is_typed_during_a_change_stays(page: Page, console: Console) -> None:
    held: list[Route] = []
    show(page, "Config")
    editor, apply = page.get_by_label("Config file"), page.get_by_role("button", name="Apply")
    before = console.config.read_text()
    expect(editor).to_have_value(before)
    page.route("**/v1/config", lambda route: held.append(route))
    editor.fill(f"# one\n{before}")
    expect(apply).to_be_enabled()
    apply.click()
    eventually(lambda: page.title() and held)
    editor.fill(f"# two\n{before}")
    held.pop().continue_()
    expect(page.get_by_role("heading", name="What this text would change")).to_be_visible()
    expect(page.get_by_role("heading", name="Applied")).to_be_visible()
    eventually(lambda: page.title() and held)
    expect(apply).to_be_disabled()  # the version that it has to name is not read yet
    held.pop().continue_()
    page.unroute("**/v1/config")
    expect(editor).to_have_value(f"# two\n{before}")
    apply.click()  # it is a change of what was applied before
    eventually(lambda: page.title() and console.config.read_text() == f"# two\n{before}")
    expect(apply).to_be_disabled()


def test_change_is_applied_although_another_page_is_visited(page: Page, console: Console) -> None:
    show(page, "Config")
    editor, apply = page.get_by_label("Config file"), page.get_by_role("button", name="Apply")
    before = console.config.read_text()
    editor.fill(f"# three\n{before}")
    expect(apply).to_be_enabled()
    held: list[Route] = []
    page.route("**/v1/config", lambda route: held.append(route) if is_put(route) else route.continue_())
    apply.click()
    eventually(lambda: page.title() and held)
    show(page, "Models")
    show(page, "Config")
    expect(page.get_by_role("heading", name="What this text would change")).to_be_visible()
    expect(apply).to_be_disabled()
    expect(page.get_by_role("button", name="Reload from disk")).to_be_disabled()
    editor.fill(before)  # also what the file had before is a change now
    held.pop().continue_()
    eventually(lambda: page.title() and console.config.read_text() == f"# three\n{before}")
    expect(page.get_by_role("heading", name="Applied")).to_be_visible()
    expect(editor).to_have_value(before)
    apply.click()
    eventually(lambda: page.title() and held)
    held.pop().continue_()
    eventually(lambda: page.title() and console.config.read_text() == before)


def test_refusal_of_a_change_is_shown_after_a_visit_of_another_page(page: Page, console: Console) -> None:
    show(page, "Config")
    page.get_by_label("Config file").fill(f"# refused\n{console.config.read_text()}")
    held: list[Route] = []
    page.route("**/v1/config", lambda route: held.append(route) if is_put(route) else route.continue_())
    page.get_by_role("button", name="Apply").click()
    eventually(lambda: page.title() and held)
    show(page, "Models")
    held.pop().fulfill(status=409, json={"error": {"message": "The file was changed meanwhile."}})
    show(page, "Config")
    expect(page.get_by_role("alert")).to_contain_text("The file was changed meanwhile.")
    expect(page.get_by_text("Copy your text first")).to_be_visible()
    page.get_by_role("button", name="Reload from disk").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_label("Config file")).to_have_value(console.config.read_text())


def is_put(route: Route) -> bool:
    return route.request.method == "PUT"


def test_text_is_not_lost_if_the_file_cannot_be_read_again(page: Page, console: Console) -> None:
    show(page, "Config")
    editor = page.get_by_label("Config file")
    edited = f"# edited\n{console.config.read_text()}"
    editor.fill(edited)
    page.route("**/v1/config", lambda route: route.fulfill(status=500, json={"message": "No file."}))
    page.get_by_role("button", name="Reload from disk").click()
    expect(page.get_by_role("alert")).to_contain_text("No file.")
    expect(editor).to_have_value(edited)


def test_edit_survives_a_visit_of_another_page(page: Page, console: Console) -> None:
    show(page, "Config")
    editor = page.get_by_label("Config file")
    edited = f"# edited\n{console.config.read_text()}"
    editor.fill(edited)
    show(page, "Models")
    show(page, "Config")
    expect(editor).to_have_value(edited)
    page.get_by_role("button", name="Reload from disk").click()
    expect(editor).to_have_value(console.config.read_text())


def test_browser_asks_before_it_closes_a_tab_with_an_edit(page: Page, console: Console) -> None:
    show(page, "Config")
    focus_on(page, page.get_by_label("Config file"))
    page.keyboard.type("# edited")
    with page.expect_event("dialog") as dialog:
        page.close(run_before_unload=True)
    assert dialog.value.type == "beforeunload"
    with page.expect_event("close"):
        dialog.value.accept()


def test_error_of_a_failed_check_ends_with_a_good_one(page: Page, console: Console) -> None:
    failing = [True]

    def check(route: Route) -> None:
        if failing:
            route.fulfill(status=500, json={"error": {"message": "No check.", "remedy": ""}})
        else:
            route.continue_()

    page.route("**/v1/config/check", check)
    show(page, "Config")
    expect(page.get_by_role("alert")).to_contain_text("No check.")
    failing.clear()
    page.get_by_label("Config file").fill(f"# edited\n{console.config.read_text()}")
    expect(page.get_by_role("heading", name="What this text would change")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


# --- run


@pytest.fixture(scope="module")
def run_console(runtime: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("r")
    env = {**os.environ, **folders_of(home)}
    with started("run", str(tiny_model), "--runtime", runtime, "--port", "0", env=env) as running:
        yield Console(running, running.url, home / "none", env)


def test_console_of_run_shows_its_model_and_no_editor(run_console: Console, new_context: NewContext) -> None:
    page = sign_in(new_context(), run_console)
    expect(card(page, "tiny").locator(".state")).to_have_text("ready")
    for name in ("Memory", "Requests", "Plan", "Playground", "Batches", "Logs", "Usage"):
        show(page, name)
        expect(page.get_by_role("alert")).to_have_count(0)
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url))
    page.get_by_role("navigation").get_by_role("link", name="Config", exact=True).click()
    expect(page.get_by_text("This llamasup has no config file.")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("textbox")).to_have_count(0)
    assert not any(url.endswith("/config/check") for url in asked)
