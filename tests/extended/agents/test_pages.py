"""Programs with a page of their own, in Chromium, with a real llama-server behind llamasup."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from tests.e2e.driver import PATIENCE_S
from tests.extended.agents.conftest import CLIENTS, Served, connect
from tests.extended.agents.install import bin_folder
from tests.extended.agents.programs import DONE, OPEN_WEBUI, Program
from tests.extended.browser.conftest import browser as browser
from tests.extended.browser.conftest import chromium as chromium
from tests.kit.patience import eventually
from tests.kit.ports import free_port
from tests.real.remains import folders_of

pytestmark = pytest.mark.skipif(not CLIENTS.exists(), reason="run scripts/test_clients, which installs them")
USER = {"name": "Me", "email": "me@example.com", "password": "a long password"}


@pytest.mark.parametrize("program", [OPEN_WEBUI], ids=["open-webui"])
def test_page_chats_in_the_browser(
    program: Program, served: Served, browser: Browser, tmp_path: Path
) -> None:
    port = str(free_port())
    env = {**os.environ, **folders_of(served.home), "HOME": str(tmp_path), "DATA_DIR": str(tmp_path)}
    env |= {**connect(program, program.name, served.url, env), **program.environment}
    words = (str(bin_folder(CLIENTS, program) / program.command[0]), *program.command[1:], port)
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            words, cwd=tmp_path, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            assert process.poll() is None, (tmp_path / "out").read_text()
            with suppress(httpx.HTTPError):
                return httpx.get(f"{url}/health", timeout=PATIENCE_S).is_success
            return False

        eventually(is_ready, "the page")
        httpx.post(f"{url}/api/v1/auths/signup", json=USER, timeout=PATIENCE_S).raise_for_status()
        page = browser.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.goto(f"{url}/auth")
        page.get_by_label("Email").fill(USER["email"])
        page.get_by_label("Password").first.fill(USER["password"])
        page.keyboard.press("Enter")
        box = page.locator("#chat-input")
        box.wait_for()
        for news in page.get_by_text("Okay, Let's Go!").all():
            news.click()
        box.click()
        page.keyboard.type("Is it done?")
        page.keyboard.press("Enter")
        page.get_by_text(DONE).first.wait_for()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
