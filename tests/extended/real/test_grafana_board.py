"""A real Prometheus answers every query of the Grafana board about a real llamasup.

Skipped where there is no ``prometheus`` (Debian: the package of this name).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from scripts.generated import grafana_board
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit.paths import ROOT
from tests.kit.patience import eventually
from tests.kit.ports import free_port

pytestmark = pytest.mark.one_runtime

PROMETHEUS = shutil.which("prometheus")
EXAMPLE = ROOT / "configs" / "prometheus" / "prometheus.yml"


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[httpx.Client]:
    """A Prometheus with the example of a config, for another address and with a shorter interval."""
    assert PROMETHEUS is not None
    config = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    config["global"]["scrape_interval"] = "200ms"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    address = f"127.0.0.1:{free_port()}"
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "tsdb"}
    words = [f"--{name}={value}" for name, value in {**options, "web.listen-address": address}.items()]
    with (folder / "log").open("wb") as log, httpx.Client(base_url=f"http://{address}") as client:
        process = subprocess.Popen([PROMETHEUS, *words], stdout=log, stderr=log)
        try:
            yield client
        finally:
            process.kill()  # its database is of no use
            process.wait(PATIENCE_S)


def answer(client: httpx.Client, promql: str) -> list[Any]:
    """What the board would show: as in Grafana, the range of a rate has at least four scrapes."""
    for name, value in (("$__rate_interval", "30s"), ("$instance", ".*"), ("$model", ".*")):
        promql = promql.replace(name, value)
    try:
        response = client.get("/api/v1/query", params={"query": promql})
    except httpx.ConnectError:  # it is starting
        return []
    if response.status_code == 503:  # the same
        return []
    shown = response.json()
    assert shown["status"] == "success", (promql, shown)
    return list(shown["data"]["result"])


def make_history(running: Llamasup) -> None:
    """Requests, an error, a crash and an unload, so that each counter has a sample."""
    body = {"prompt": "Once upon a time", "max_tokens": 8}
    httpx.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()
    assert httpx.post(f"{running.url}/v1/completions", content=b"{", timeout=PATIENCE_S).is_error
    (child,) = running.children()
    child.send_signal(signal.SIGKILL)
    running.wait_for_ready_after(1)
    httpx.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH")
def test_prometheus_answers_every_query_of_the_board(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    # What did not happen, and the nodes that are not there: these metrics have no sample.
    absent = (
        "llamasup_replays_total",
        "llamasup_batch_gave_way_total",
        "llamasup_continued_streams_total",
        "llamasup_repaired_requests_total",
        "llamasup_evictions_total",
        "llamasup_traces_dropped_total",
        "llamasup_node_state",
        "llamasup_node_in_flight",
        "llamasup_node_queued",
    )
    log = ("--access-log", str(tmp_path / "access.log"))
    with llamasup(tiny_model, "--runtime", runtime, *log) as running:
        make_history(running)
        target = running.url.removeprefix("http://")
        with prometheus(target, tmp_path) as client:
            scraped = "min(count_over_time(llamasup_build_info[1m])) >= 3"
            eventually(lambda: answer(client, scraped), "three scrapes", every_s=0.05)
            results = {promql: answer(client, promql) for promql in grafana_board.queries()}
        empty = {promql for promql, result in results.items() if not result}
        assert {name for name in absent if any(name in promql for promql in empty)} == set(absent)
        assert len(empty) == len(absent), empty
        assert len(results) > 30
        assert running.stop() == 0
