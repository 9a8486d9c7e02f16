"""``llamasup doctor`` with real runtimes, and with a configuration file of llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.driver import command, run_to_end

pytestmark = pytest.mark.real


def test_doctor_finds_a_real_runtime_with_all_capabilities(runtime: str, tiny_model: Path) -> None:
    done = run_to_end("doctor", str(tiny_model), "--json", "--runtime", runtime, "--port", "0")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.stderr == ""
    assert checks["runtime"]["ok"]
    assert ("embedded" if runtime == "embedded" else runtime) in checks["runtime"]["found"]
    assert checks["capabilities"]["remedy"] == ""
    assert checks["model"]["ok"], checks["model"]


@pytest.fixture
def with_config(tmp_path: Path) -> list[str]:
    """A prefix that runs a command where /etc/llama.cpp/config.ini has an API key; nobody else sees it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs to mount over a folder of /etc")
    etc = tmp_path / "etc"
    (etc / "llama.cpp").mkdir(parents=True)
    (etc / "llama.cpp" / "config.ini").write_text("api-key = sesame\n")
    # An overlay: everything else of /etc stays as it is.
    work = tmp_path / "work"
    work.mkdir()
    script = (
        f"mount -t tmpfs none {work} && mkdir {work}/up {work}/work && cp -r {etc}/llama.cpp {work}/up/ && "
        f"mount -t overlay none -o lowerdir=/etc,upperdir={work}/up,workdir={work}/work /etc && "
        'exec "$@"'
    )
    prefix = ["unshare", "-m", "sh", "-c", script, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount here")
    return prefix


def test_doctor_reports_api_key_in_system_config_that_locks_llamasup_out(
    with_config: list[str], llama_server: str, tiny_model: Path
) -> None:
    done = run_to_end("doctor", "--json", "--runtime", llama_server, "--port", "0", prefix=with_config)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert not checks["llama.cpp config"]["ok"]
    assert "/etc/llama.cpp/config.ini sets api-key" in checks["llama.cpp config"]["found"]
    assert "sesame" not in done.stdout

    # And it is so.
    arguments = ("run", str(tiny_model), "--runtime", llama_server, "--port", "0", "--events", "jsonl")
    running = subprocess.Popen(
        [*with_config, *command(*arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert running.stdout is not None
        with running.stdout as events:
            first_end = next(
                event for event in map(json.loads, events) if event["event"] in ("ready", "exit")
            )
        assert first_end["event"] == "exit"
        assert first_end["cause"] == "locked_out"
        assert "/etc/llama.cpp/config.ini" in first_end["remedy"]
    finally:
        running.terminate()
        running.wait(60)
