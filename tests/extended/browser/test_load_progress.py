"""How far a load is, on the pages of the models and of the requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, expect

from tests.extended.browser.conftest import Serve, card, show, sign_in
from tests.extended.real.slowed import slowed
from tests.kit.models import write_large_decoder
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.runtimes import not_mapped

pytestmark = pytest.mark.one_runtime

NewContext = Callable[..., BrowserContext]
LEFT = r"\d+ %, about [^)]+ left"


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    path = write_large_decoder(tmp_path / "large.gguf", 300_000_000, quantization="F16")
    yield path
    path.unlink()


def test_load_shows_its_percent_and_its_remaining_time(
    serve: Serve, new_context: NewContext, large: Path, runtime: str
) -> None:
    extra = list(not_mapped(runtime))
    served = {"large": {"path": str(large), "ctx_size": 512, "parallel": 1, "extra": extra}}
    console = serve(served)
    page = sign_in(new_context(), console)
    model = card(page, "large")
    progress = model.get_by_role("progressbar", name="Progress of large")
    expect(progress).to_have_count(0)
    body = {"model": "large", "prompt": "Once", "max_tokens": 2}
    with ThreadPoolExecutor(1) as clients, slowed(console.running.pid) as freed:
        url = f"{console.url}/v1/completions"
        answer = clients.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
        expect(model.locator(".progress")).to_have_text(re.compile(rf"^\s*{LEFT}$"))
        begun = float(progress.get_attribute("value") or 0.0)
        assert 0.0 < begun < 100.0
        eventually(lambda: float(progress.get_attribute("value") or 0.0) > begun)
        show(page, "Requests")
        row = page.get_by_role("row").filter(has_text="/v1/completions")
        expect(row.get_by_role("cell").nth(1)).to_have_text(re.compile(rf"^loading \(place 1, {LEFT}\)$"))
        freed.set()
        assert answer.result(PATIENCE_S).status_code == 200
    show(page, "Models")
    expect(model.locator(".state")).to_have_text("ready")
    expect(progress).to_have_count(0)
