"""``llamasup doctor`` with real runtimes, and with a configuration file of llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import command, llamasup, run_to_end
from tests.kit.patience import eventually
from tests.kit.runtimes import reads_config_file


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
    if not reads_config_file(llama_server):
        pytest.skip("this build reads no llama.cpp/config.ini")
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


def test_report_contains_events_and_log_and_neither_prompt_nor_key(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "plantedkey-0123456789"
    monkeypatch.setenv("LLAMASUP_API_KEY", key)
    path = tmp_path / "report.md"
    headers = {"authorization": f"Bearer {key}"}
    with llamasup(tiny_model, "--runtime", runtime) as running, httpx.Client(headers=headers) as client:
        url = f"{running.url}/completion"
        assert client.post(url, json={"prompt": "planted prompt", "n_predict": 2}).status_code == 200
        # llama-server quotes a grammar that it cannot read.
        grammar = "root ::= plantedgrammar \n plantedline"
        assert client.post(url, json={"prompt": "planted", "grammar": grammar}).status_code == 400
        log = own_folders / "state" / "llamasup" / "logs" / "tiny.log"
        eventually(lambda: "prompt eval time" in log.read_text())
        done = run_to_end(
            "doctor", str(tiny_model), "--runtime", runtime, "--port", "0", "--report", str(path)
        )
    assert done.returncode == 0
    assert "No problems found." in done.stdout
    assert "Read it before you publish it" in done.stderr
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "planted" not in text
    assert '"event": "warmup_succeeded"' in text
    assert "listening on" not in text  # a later line may be about a request
    assert "prompt eval time" in text
    assert '"argv": [' in text


def test_report_to_standard_output_is_all_of_it(runtime: str) -> None:
    done = run_to_end("doctor", "--runtime", runtime, "--port", "0", "--report", "-")
    assert done.stdout.startswith("# llamasup bug report\n")
    assert "No problems found" not in done.stdout


def test_report_that_cannot_be_written_is_an_error(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.md"
    done = run_to_end("doctor", "--runtime", runtime, "--port", "0", "--report", str(path))
    assert done.returncode == 71
    assert f"Cannot write the report to '{path}': No such file or directory." in done.stderr


def test_report_and_json_cannot_share_standard_output(runtime: str) -> None:
    done = run_to_end("doctor", "--runtime", runtime, "--json", "--report", "-")
    assert done.returncode == 2
    assert "--json and --report -" in done.stderr
