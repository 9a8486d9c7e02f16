"""The usage of a real llama-server equals what the clients and llama-server itself count."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.driver import llamasup, run_to_end
from tests.real.usage_load import COUNTS, KEYS, UsageLoad

pytestmark = pytest.mark.real


def test_usage_equals_the_counts_of_clients_and_servers_across_a_crash(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"secret-{name} name={name}\n" for name in KEYS))
    keys.chmod(0o600)
    options = ("--runtime", runtime, "--api-key-file", str(keys), "--parallel", "4")
    with llamasup(tiny_model, *options) as running:
        running.wait_for("ready")
        load = UsageLoad(running)
        load.requests(60)
        load.crash()
        load.requests(40)
        load.finish()
        assert load.usage("key") == load.counted
        [counted] = load.usage("model").values()
        assert counted == load.total()
        servers = load.of_servers()
        assert counted["tokens_completion"] == servers["predicted"]
        assert counted["tokens_prompt"] - counted["tokens_cached"] == servers["prompt"]
        assert running.stop() == 0
    shown = json.loads(run_to_end("usage", "--by", "key", "--json").stdout)
    saved = {row["key"]: Counter({name: row[name] for name in COUNTS}) for row in shown["rows"]}
    assert saved == load.counted
