"""llama-server's own web interface, which drives models through llama.cpp's router API (docs/router.md)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.extended.browser.conftest import Serve
from tests.kit.paths import ROOT
from tests.kit.patience import eventually

pytestmark = pytest.mark.one_runtime

NewContext = Callable[..., BrowserContext]


@pytest.fixture(scope="module")
def with_ui() -> str:
    """The llama-server of a wheel: the one that is built from source has no web interface."""
    found = subprocess.run(
        [ROOT / "scripts" / "llama-server"],
        env={**os.environ, "LLAMASUP_TEST_SERVER": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        pytest.skip(found.stderr)
    return found.stdout.strip()


def menu_of(page: Page, *, at: str) -> Locator:
    """Open the menu of models, whose button shows this one."""
    page.get_by_role("button", name=at, exact=True).click()
    menu = page.locator("[data-state=open]").filter(has=page.get_by_placeholder("Search models..."))
    expect(menu.last).to_be_visible()
    return menu.last


def state_of(url: str, model: str) -> Any:
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    return next(each["status"]["value"] for each in listed if each["id"] == model)


def test_menu_of_models_loads_and_unloads(serve: Serve, browser: Any, with_ui: str) -> None:
    router = {"inference_keys": True, "props": True}
    served = {"first": {"preload": True, "ctx_size": 512}, "second": {"ctx_size": 512}}
    console = serve(served, "--no-ui", router=router, default_model="first", runtime=with_ui)
    # Without ``watched``: the interface looks for tools and a service worker, which are closed.
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{console.url}/")
        menu = menu_of(page, at="first")
        expect(menu.get_by_text("Available models")).to_be_visible()
        row = menu.get_by_role("option").filter(has_text=re.compile("second"))
        row.hover()
        row.get_by_label("Load model").click()
        expect(page.get_by_text("Model loaded: second")).to_be_visible()
        assert state_of(console.url, "second") == "loaded"
        row = menu.get_by_role("option").filter(has_text=re.compile("second"))
        row.hover()
        row.get_by_label("Unload model").click()
        expect(page.get_by_text("Model unloaded: second")).to_be_visible()
        eventually(lambda: state_of(console.url, "second") == "unloaded")
