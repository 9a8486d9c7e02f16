"""``serve`` downloads missing models: those of the config and, if the config allows it, requested ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

import llamasup
from llamasup.core.config.config_keys import Config
from llamasup.core.settings.model import ModelEntry
from llamasup.features.downloads.settings import Downloads
from tests.kit.hub import Fault, Hub, running_hub
from tests.kit.patience import PATIENCE_S
from tests.kit.tiny import tiny_decoder

pytestmark = pytest.mark.one_runtime

ASKED = {"prompt": "Once", "max_tokens": 2}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": tiny_decoder()}
        yield hub


def config_of(hub: Hub, folder: Path, *, on_demand: bool = False, **models: ModelEntry) -> Config:
    downloads = Downloads(
        on_demand=on_demand, folder=folder, endpoint=hub.url, private_addresses=True, parallel=1
    )
    return Config(models=models, models_dir=(folder,), features={"downloads": downloads})


def ask(server: llamasup.Server, model: str) -> tuple[int, str]:
    answer = server.client.post("/v1/completions", json={"model": model, **ASKED})
    said = answer.json()
    return answer.status_code, said["model"] if answer.is_success else said["error"]["cause"]


def downloads_of(hub: Hub) -> int:
    return sum(request.path.endswith(".gguf") and request.range != "bytes=0-0" for request in hub.asked)


def test_model_of_the_config_is_downloaded_once_at_its_first_request(
    hub: Hub, runtime: str, tmp_path: Path
) -> None:
    config = config_of(hub, tmp_path, tiny=ModelEntry(repo="org/tiny-GGUF", ctx_size=512))
    with llamasup.serve(config=config, runtime=runtime) as server:
        assert downloads_of(hub) == 0
        with ThreadPoolExecutor(4) as clients:
            assert list(clients.map(lambda _: ask(server, "tiny"), range(4))) == [(200, "tiny")] * 4
        assert downloads_of(hub) == 1
    with llamasup.serve(config=config, runtime=runtime) as server:
        assert ask(server, "tiny") == (200, "tiny")
    assert downloads_of(hub) == 1


def test_facts_of_a_model_are_shown_after_its_download(hub: Hub, llama_server: str, tmp_path: Path) -> None:
    config = structs.replace(config_of(hub, tmp_path, tiny=ModelEntry(repo="org/tiny-GGUF")), models_dir=())
    with llamasup.serve(config=config, runtime=llama_server) as server:

        def shown_facts() -> tuple[object, object, object]:
            (listed,) = server.client.get("/v1/models").json()["data"]
            (status,) = server.status()["models"]
            return listed["llamasup"]["class"], status["class"], status["size_bytes"]

        assert shown_facts() == (None, None, None)
        assert ask(server, "tiny") == (200, "tiny")
        assert shown_facts() == ("decoder", "decoder", len(tiny_decoder()))


def test_requested_repository_is_downloaded_only_if_the_config_allows_it(
    hub: Hub, llama_server: str, tmp_path: Path
) -> None:
    with llamasup.serve(config=config_of(hub, tmp_path), runtime=llama_server) as server:
        assert ask(server, "org/tiny-GGUF:Q4_K_M") == (404, "model_not_found")
        assert hub.asked == []
    with llamasup.serve(config=config_of(hub, tmp_path, on_demand=True), runtime=llama_server) as server:
        assert ask(server, "org/tiny-GGUF:Q4_K_M") == (200, "org/tiny-GGUF:Q4_K_M")
        assert ask(server, "org/nothing-GGUF") == (503, "access_denied")  # the hub has no such repository
        assert ask(server, "no-repository") == (404, "model_not_found")
        assert "org/tiny-GGUF:Q4_K_M" in [
            item["id"] for item in server.client.get("/v1/models").json()["data"]
        ]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("org/tiny-GGUF:Q4_K_M", "org/tiny-GGUF"),
        ("org/tiny-GGUF", "org/tiny-GGUF:Q4_K_M"),
        ("tiny", "org/tiny-GGUF:Q4_K_M"),
    ],
)
def test_downloaded_model_is_one_process_under_all_its_names(
    hub: Hub, runtime: str, tmp_path: Path, name: str, other: str
) -> None:
    models = {"tiny": ModelEntry(repo="org/tiny-GGUF", ctx_size=512)} if name == "tiny" else {}
    config = config_of(hub, tmp_path, on_demand=True, **models)
    with llamasup.serve(config=config, runtime=runtime) as server:
        events = server.events()
        assert ask(server, name) == (200, name)
        (before,) = server.status()["models"]
        found = "tiny" if name == "tiny" else "tiny-Q4_K_M"
        assert before["id"] in (name, found)  # the watch may have found the file already
        seen_events = []
        for event in events:  # until the watch finds the file
            seen_events.append(event)
            if event["event"] == "models":
                break
        (after,) = server.status()["models"]
        assert after["id"] == found
        assert (after["pid"], after["state"]) == (before["pid"], "ready")
        for alias in (name, other, after["id"]):
            assert ask(server, alias) == (200, name)  # the server was started with this alias
        (again,) = server.status()["models"]
        assert (again["pid"], again["generation"]) == (before["pid"], 1)
        assert sum(seen["event"] == "state" and seen["state"] == "starting" for seen in seen_events) == 1
    assert downloads_of(hub) == 1


def test_request_that_times_out_during_a_download_gets_its_progress(
    hub: Hub, llama_server: str, tmp_path: Path
) -> None:
    hub.faults.append(Fault("tiny-Q4_K_M.gguf", hold_after=300_000, only_parts=True))
    entry = ModelEntry(repo="org/tiny-GGUF", ctx_size=512, wait_timeout_s=2.0)
    with llamasup.serve(config=config_of(hub, tmp_path, tiny=entry), runtime=llama_server) as server:
        answer = server.client.post("/v1/completions", json={"model": "tiny", **ASKED})
        deadline_s = time.monotonic() + PATIENCE_S
        while answer.json()["error"]["cause"] == "loading":  # on a busy machine the download begins later
            assert time.monotonic() < deadline_s
            answer = server.client.post("/v1/completions", json={"model": "tiny", **ASKED})
        assert (answer.status_code, answer.json()["error"]["cause"]) == (503, "downloading")
        assert "is being downloaded" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        loading = threading.Thread(target=server.load, args=("tiny",))
        loading.start()
        hub.released.set()
        loading.join(60)
        assert ask(server, "tiny") == (200, "tiny")
    assert hub.held.is_set()
