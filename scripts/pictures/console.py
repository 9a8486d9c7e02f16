"""The pictures of the console in docs/console.md, of a real llamasup with generated models.

    python -m scripts.pictures console            measure, and print the sizes of the pictures
    python -m scripts.pictures console --write    write them into docs/images/console/

It needs the embedded runtime and Chromium: `chromium` on PATH, or LLAMASUP_CHROMIUM. It also prints how
long a browser with an empty cache takes on loopback until the first paint, and until a page has its heading.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, Route, sync_playwright

from llamasup.core.planning.facts import demo_model
from scripts.pages import ROOT
from tests.e2e.driver import run_to_end, started
from tests.kit import models
from tests.real.remains import folders_of

FOLDER = ROOT / "docs" / "images" / "console"
MOST_BYTES = 100_000
SIZE = {"width": 1000, "height": 620}
PAINTS = 7
PICTURES = (
    ("models-light", "Models", "light"),
    ("models-dark", "Models", "dark"),
    ("plan-light", "Plan", "light"),
    ("playground-dark", "Playground", "dark"),
    ("memory-light", "Memory", "light"),
    ("usage-light", "Usage", "light"),
)
MADE = {
    "storyteller": demo_model,
    "storyteller-two": demo_model,
    "bge-embedder": models.tiny_encoder,
    "bge-reranker": models.tiny_reranker,
}
"""Made-up names of generated models."""
PRELOADED = ("storyteller", "bge-embedder")


def config_in(home: Path) -> Path:
    listed = {}
    for name, make in MADE.items():
        (home / f"{name}.gguf").write_bytes(make())
        listed[name] = {
            "path": str(home / f"{name}.gguf"),
            "preload": name in ("storyteller", "bge-embedder"),
        }
    path = home / "config.yaml"
    config = {"listen": "127.0.0.1:0", "runtime": "embedded", "models": listed}
    path.write_text(json.dumps(config, indent=2), "utf-8")
    return path


def show(page: Page, name: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    page.get_by_role("heading", level=1, name=name).wait_for()
    page.get_by_text("Loading…").wait_for(state="detached")


def prepare(page: Page, name: str) -> None:
    """Bring the page into the state of the picture."""
    show(page, name)
    if name == "Models":
        page.locator("canvas").nth(3).wait_for()
    elif name == "Plan":
        page.locator("pre.command").wait_for()
    elif name == "Playground":
        page.get_by_label("Second model").select_option("storyteller-two")
        page.get_by_label("Most tokens").fill("60")
        page.get_by_label("Message").fill("Tell me a story about a fox.")
        page.keyboard.press("Enter")
        page.get_by_text("60 tokens").nth(1).wait_for()
    elif name == "Memory":
        page.locator(".legend").wait_for()
    elif name == "Usage":
        page.locator("canvas").nth(1).wait_for()


def with_short_paths(route: Route) -> None:
    """The plan without the folders of this checkout, so that each machine makes the same picture."""
    text = route.fetch().text().replace(sys.executable, "/usr/bin/python3")
    folder = re.escape(tempfile.gettempdir()) + r"/shots[^/\"]*"
    route.fulfill(body=re.sub(folder, "/models", text), content_type="application/json")


def page_times_ms(page: Page, url: str) -> tuple[float, float]:
    """Measure the first paint, and the heading, after the script has run and the session is known."""
    page.add_init_script(
        """new MutationObserver((_, observer) => {
            if (!document.querySelector("h1")) return;
            window.headingTime = performance.now();
            observer.disconnect();
        }).observe(document, { childList: true, subtree: true });"""
    )
    page.goto(url)
    page.locator("h1").wait_for()
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return float(paint), float(page.evaluate("headingTime"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write docs/images/console/*.png")


def main(options: argparse.Namespace) -> int:
    chromium = os.environ.get("LLAMASUP_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        print("Chromium is missing: install it, or set LLAMASUP_CHROMIUM to its path.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="shots") as folder:
        home = Path(folder)
        env = {**os.environ, **folders_of(home)}
        with (
            started("serve", "--config", str(config_in(home)), env=env) as running,
            sync_playwright() as playwright,
        ):
            url = f"{running.url}/llamasup/"
            browser = playwright.chromium.launch(executable_path=chromium)
            address = run_to_end("ui", "--print", env=env).stdout.strip()
            pictures = taken(browser, url, address)
            browser.close()
            running.stop()
    too_large = [name for name, picture in pictures.items() if len(picture) > MOST_BYTES]
    for name, picture in pictures.items():
        print(f"{name}.png: {len(picture):,} bytes")
    if options.write and not too_large:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (FOLDER / f"{name}.png").write_bytes(picture)
    if too_large:
        print(f"Larger than {MOST_BYTES:,} bytes: {', '.join(too_large)}", file=sys.stderr)
    return 1 if too_large else 0


def taken(browser: Browser, url: str, address: str) -> dict[str, bytes]:
    """The pictures by name."""
    first = browser.new_context()
    page = first.new_page()
    page.goto(address)
    page.get_by_role("button", name="Sign out").wait_for()
    state = first.storage_state()
    times = []
    for _ in range(PAINTS):
        context = browser.new_context(storage_state=state)
        times.append(page_times_ms(context.new_page(), url))
        context.close()
    for what, of_what in zip(("first paint", "heading"), zip(*times, strict=True), strict=True):
        print(
            f"{what}: median {statistics.median(of_what):.0f} ms, slowest {max(of_what):.0f} ms of {PAINTS}"
        )
    found = {}
    for name, title, colours in PICTURES:
        context = browser.new_context(storage_state=state, color_scheme=colours, viewport=SIZE)
        page = context.new_page()
        page.route("**/v1/plan", with_short_paths)
        page.goto(url)
        page.get_by_role("button", name="Sign out").wait_for()
        prepare(page, title)
        page.get_by_text("live", exact=True).wait_for()
        found[name] = page.screenshot(animations="disabled")
        context.close()
    return found
