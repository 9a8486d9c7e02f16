"""The page of batches, with the batches of a real llamasup."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.extended.browser.conftest import Console, Serve, show, sign_in

pytestmark = pytest.mark.one_runtime

NewContext = Callable[..., BrowserContext]
KEYS = "sk-of-ann name=ann\nsk-of-admin name=admin rights=control\n"
WHOLE = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
MISTAKE = {"prompt": "no", "max_tokens": "many"}


def rows(page: Page) -> Any:
    return page.locator("table.batches tbody").get_by_role("row")


def create(console: Console, bodies: Sequence[dict[str, Any]], endpoint: Any = "/v1/completions") -> str:
    """A batch of ann. Returns its id."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", **body},
        }
        for number, body in enumerate(bodies)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{console.url}/v1", api_key="sk-of-ann", max_retries=0) as client:
        uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=uploaded.id,
            endpoint=endpoint,
            completion_window="24h",
            metadata={"for": "ann only"},
        )
        return made.id


def test_batches_of_all_clients_are_shown_and_cancelled(serve: Serve, new_context: NewContext) -> None:
    console = serve({"tiny": {"ctx_size": 32_768, "parallel": 1}}, keys=KEYS, batches={"enabled": True})
    page = sign_in(new_context(), console)
    show(page, "Batches")
    expect(page.get_by_text("No batch has been created.")).to_be_visible()

    create(console, [WHOLE, WHOLE, MISTAKE])
    row = rows(page).first
    expect(row.locator(".state")).to_have_text("completed")
    texts = [text.strip() for text in row.get_by_role("cell").all_inner_texts()]
    assert (texts[0], texts[1], texts[3:7]) == ("key:ann", "/v1/completions", ["3", "2", "1", "100 %"])

    create(console, [WHOLE], endpoint="/v1/embeddings")
    expect(row.locator(".state")).to_have_text("failed")
    expect(row).to_contain_text("line 1: ")

    endless = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True}
    id_ = create(console, [endless] * 20)
    page.get_by_role("button", name=f"Cancel batch {id_}").click()
    expect(row.locator(".state")).to_have_text("cancelled")
    expect(rows(page)).to_have_count(3)
    expect(page.get_by_role("button", name="Cancel batch")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_text("ann only")).to_have_count(0)


def test_llamasup_without_batches_says_so(serve: Serve, new_context: NewContext) -> None:
    page = sign_in(new_context(), serve({"tiny": {}}))
    show(page, "Batches")
    expect(page.get_by_text("This llamasup does not have this function.")).to_be_visible()
