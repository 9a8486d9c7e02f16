"""The page of the usage, with the usage of a real llamasup in another time zone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from llamasup.features.usage.ledger import Group, Sums
from llamasup.features.usage.store import save
from tests.extended.browser.conftest import Serve, show, sign_in
from tests.kit.patience import PATIENCE_S, eventually

pytestmark = pytest.mark.one_runtime

NewContext = Callable[..., BrowserContext]
AHEAD = timedelta(hours=23, minutes=59)
"""How far the clock of llamasup is ahead of UTC: its day is never the browser's."""

DRAWN = """{
    const draw = CanvasRenderingContext2D.prototype.fillText;
    window.drawn = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        window.drawn.push(text);
        return draw.call(this, text, ...rest);
    };
}"""
"""Notes the texts of the charts in ``drawn``."""


def rows(page: Page) -> Any:
    return page.locator("tbody").get_by_role("row")


def test_usage_of_real_requests_is_shown_by_the_days_of_llamasup(
    serve: Serve, new_context: NewContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "X-23:59")
    console = serve({"tiny": {"ctx_size": 512, "parallel": 1}}, keys="sk-of-ann name=ann rights=inference\n")
    headers = {"Authorization": "Bearer sk-of-ann"}
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 3, "ignore_eos": True}
    for _ in range(2):
        url = f"{console.url}/v1/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S).status_code == 200

    context = new_context(timezone_id="Pacific/Pago_Pago")  # 11 hours behind UTC
    context.add_init_script(DRAWN)
    page = sign_in(context, console)
    show(page, "Usage")
    expect(rows(page)).to_have_count(1)
    cells = rows(page).get_by_role("cell")
    expect(rows(page).get_by_role("rowheader")).to_have_text("tiny")
    expect(cells.nth(0)).to_have_text("2")
    expect(cells.nth(4)).to_have_text("6")
    held: list[Route] = []
    page.route("**/usage?by=key&*", lambda route: held.append(route))
    page.get_by_label("By").select_option("key")
    eventually(lambda: page.title() and held)
    expect(page.get_by_role("columnheader").first).to_have_text("model")  # until the other rows are there
    expect(rows(page).get_by_role("rowheader")).to_have_text("tiny")
    held.pop().continue_()
    page.unroute("**/usage?by=key&*")
    expect(page.get_by_role("columnheader").first).to_have_text("key")
    expect(rows(page).get_by_role("rowheader")).to_have_text("ann")

    with page.expect_response("**/usage?by=day&since=6d") as answer:
        page.get_by_label("Days").select_option("7")
        page.get_by_label("By").select_option("day")
    first = date.fromisoformat(answer.value.json()["since"])
    today = first + timedelta(days=6)
    assert abs(today - (datetime.now(UTC) + AHEAD).date()) <= timedelta(days=1)  # midnight may pass
    expect(rows(page).get_by_role("rowheader")).to_have_text(today.isoformat())
    expect(page.locator("canvas")).to_have_count(2)
    week = {(first + timedelta(days=days)).strftime("%m-%d") for days in range(7)}
    eventually(lambda: len(week & set(page.evaluate("drawn"))) > 2)
    assert (today + timedelta(days=1)).strftime("%m-%d") not in page.evaluate("drawn")

    earlier = [first - timedelta(days=1), first]
    save(usage_file(console.env), [(Group(day.isoformat(), "tiny", "ann"), Sums(5)) for day in earlier])
    page.reload()
    show(page, "Usage")
    page.get_by_label("By").select_option("day")
    expect(rows(page)).to_have_count(3)  # of 30 days
    page.get_by_label("Days").select_option("7")
    expect(rows(page)).to_have_count(2)
    expect(rows(page).get_by_role("rowheader")).to_have_text([first.isoformat(), today.isoformat()])


def test_usage_that_is_switched_off_is_said(serve: Serve, new_context: NewContext) -> None:
    page = sign_in(new_context(), serve({"tiny": {}}, "--no-usage"))
    show(page, "Usage")
    expect(page.get_by_role("alert")).to_contain_text("This llamasup does not count the usage")
    expect(page.get_by_text("No requests in these days.")).to_have_count(0)


def usage_file(env: dict[str, str]) -> Path:
    return Path(env["XDG_STATE_HOME"]) / "llamasup" / "usage.sqlite"
