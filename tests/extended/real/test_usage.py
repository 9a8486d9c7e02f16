"""The usage of a real llama-server equals what the clients and llama-server itself count."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.driver import llamasup, run_to_end
from tests.extended.real.usage_load import UsageLoad, counts_of, write_keys


def test_usage_equals_the_counts_of_clients_and_servers_across_a_crash(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys")
    options = ("--runtime", runtime, "--api-key-file", str(keys), "--parallel", "4")
    with llamasup(tiny_model, *options) as running:
        running.wait_for("ready")
        load = UsageLoad(running)
        load.run(requests=100, crashes=1)
        assert load.usage("key") == load.counted
        [counted] = load.usage("model").values()
        assert counted == load.total()
        servers = load.of_servers()
        assert counted["tokens_completion"] == servers["predicted"]
        assert counted["tokens_prompt"] - counted["tokens_cached"] == servers["prompt"]
        assert running.stop() == 0
    shown = json.loads(run_to_end("usage", "--by", "key", "--json").stdout)
    assert {row["key"]: counts_of(row) for row in shown["rows"]} == load.counted
