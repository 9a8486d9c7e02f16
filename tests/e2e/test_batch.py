"""``llamasup batch`` as a process: bad input, the same batch twice, and what the commands show."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driver import PATIENCE_S, children_of, command, llamasup, run_to_end, started
from tests.kit.patience import eventually

ServerMaker = Callable[..., str]


def line(number: int, **changes: Any) -> str:
    return json.dumps(
        {
            "custom_id": f"id{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x", "max_tokens": 2},
            **changes,
        }
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line(number) for number in range(50)))
    return path


def ids(output: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in output.read_text().splitlines())


def shown(*arguments: str) -> Any:
    done = run_to_end("batch", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_batch_runs_on_a_running_llamasup_and_is_listed(
    fake_server: ServerMaker, tiny_model: Path, own_folders: Path, source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        running.wait_for("ready")
        done = run_to_end("batch", "run", str(source), "-o", str(output))
        assert done.returncode == 0, done.stderr
        assert "50 answers and 0 errors" in done.stderr
        again = run_to_end("batch", "run", str(source), "-o", str(output))
        assert again.returncode == 0
        assert "nothing was left to do" in again.stderr
        assert running.stop() == 0
    assert len(set(ids(output))) == 50
    assert output.stat().st_mode & 0o777 == 0o600
    [listed] = shown("list")["batches"]
    assert listed["state"] == "completed"
    assert (listed["total"], listed["done"], listed["failed"]) == (50, 50, 0)
    assert shown("status", str(output)) == listed
    assert listed["id"] in run_to_end("batch", "list").stdout
    assert "completed: 50 of 50 lines" in run_to_end("batch", "status", listed["id"]).stdout


def test_certificate_that_is_not_trusted_ends_the_batch_at_once(
    fake_server: ServerMaker,
    tiny_model: Path,
    own_folders: Path,
    source: Path,
    tmp_path: Path,
    certificate: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain, key = certificate
    words = ("batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"))
    with llamasup(tiny_model, "--runtime", fake_server(), "--tls-cert", chain, "--tls-key", key) as running:
        url = running.wait_for("ready")["url"]
        refused = run_to_end(*words, "--url", url)
        assert refused.returncode == 69
        assert "Trust the CA of its certificate: SSL_CERT_FILE=FILE." in refused.stderr
        monkeypatch.setenv("SSL_CERT_FILE", chain)
        done = run_to_end(*words, "--url", url)
        assert done.returncode == 0, done.stderr
        assert running.stop() == 0


def test_batch_says_that_nobody_listens(own_folders: Path, source: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    words = ("batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", url)
    with subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True) as batch:
        try:
            assert batch.stderr is not None
            assert f"waiting: No llamasup answers at {url}" in batch.stderr.readline()
            eventually(
                lambda: (
                    f"answers at {url}" in (shown("status", str(tmp_path / "out.jsonl"))["waiting"] or "")
                ),
                "the reason in the status",
            )
            text = run_to_end("batch", "status", str(tmp_path / "out.jsonl")).stdout
            assert f"running, waiting (No llamasup answers at {url}" in text
        finally:
            batch.terminate()


def test_batch_starts_a_llamasup_and_fills_a_template(
    fake_server: ServerMaker, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    source, template, output = tmp_path / "in.jsonl", tmp_path / "t.json", tmp_path / "out.jsonl"
    source.write_text('{"word": "fox"}\n"owl"\n')
    template.write_text('{"prompt": "Say $word", "max_tokens": 2}')
    words = ("batch", "run", str(source), "-o", str(output), "--endpoint", "/v1/completions")
    options = ("--model", str(tiny_model), "--", "--runtime", fake_server())
    refused = run_to_end(*words, "--template", str(template), *options)
    assert refused.returncode == 65
    assert "line 2: the template needs the field 'word'" in refused.stderr
    source.write_text('{"word": "fox"}\n{"word": "owl"}\n')
    done = run_to_end(*words, "--template", str(template), *options, "--parallel", "2")
    assert done.returncode == 0, done.stderr
    assert ids(output) == ["line-1", "line-2"]


def test_batch_uses_the_key_that_the_llamasup_it_starts_has(
    fake_server: ServerMaker,
    tiny_model: Path,
    own_folders: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_API_KEY", "sk-a-key-of-the-environment")
    words = ("batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"))
    done = run_to_end(*words, "--model", str(tiny_model), "--", "--runtime", fake_server())
    assert done.returncode == 0, done.stderr
    assert "50 answers and 0 errors" in done.stderr


def test_batch_that_starts_a_llamasup_can_be_interrupted_while_that_loads(
    fake_server: ServerMaker, tiny_model: Path, own_folders: Path, source: Path, tmp_path: Path
) -> None:
    words = ("batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--model", str(tiny_model))
    with subprocess.Popen(command(*words, "--", "--runtime", fake_server("load_s=3600"))) as batch:
        try:
            eventually(lambda: len(children_of(batch.pid)) >= 2, "llamasup and its llama-server")
            children = children_of(batch.pid)
            batch.terminate()
            assert batch.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            batch.kill()
    eventually(lambda: not any(child.is_running() for child in children), "the end of its children")


def test_interrupted_batch_is_continued_by_resume(
    fake_server: ServerMaker, tiny_model: Path, own_folders: Path, source: Path, tmp_path: Path
) -> None:
    output, flag = tmp_path / "out.jsonl", tmp_path / "go"
    with llamasup(tiny_model, "--runtime", fake_server("stall_after=1", f"until={flag}")) as running:
        words = command("batch", "run", str(source), "-o", str(output), "--url", running.url)
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as batch:
            eventually(lambda: run_to_end("batch", "list").stdout, "the batch in the list")
            second = run_to_end("batch", "run", str(source), "-o", str(output), "--url", running.url)
            assert second.returncode == 75
            assert "Another process already runs the batch" in second.stderr
            assert shown("status", str(output))["state"] == "running"
            done = run_to_end("batch", "cancel", str(output))
            assert "ended" in done.stderr
            assert batch.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert shown("status", str(output))["state"] == "cancelled"
        flag.touch()
        resumed = run_to_end("batch", "resume", str(output))
        assert resumed.returncode == 0, resumed.stderr
        assert len(ids(output)) == 50
        assert "it was not running" in run_to_end("batch", "cancel", str(output)).stderr
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("content", "code", "why"),
    [
        (b"", 65, "no lines"),
        (b"\xff\xfe", 65, "line 1: invalid UTF-8 at byte 1: 0xff"),
        (f"{line(1)}\r\n{line(1)}".encode(), 65, "line 2: custom_id 'id1' is also that of line 1"),
        (line(1, url="/v1/files").encode(), 65, "line 1: url is '/v1/files'"),
    ],
)
def test_mistakes_are_shown_by_line_before_anything_is_sent(
    own_folders: Path, tmp_path: Path, content: bytes, code: int, why: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    done = run_to_end("batch", "run", str(source), "-o", str(tmp_path / "out"), "--url", "localhost:1")
    assert done.returncode == code
    assert why in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("none", "-o", "out"), "cannot be read: No such file"),
        ((".", "-o", "out"), "not a regular file"),
        (("in.jsonl", "-o", "in.jsonl"), "the same file"),
        (("in.jsonl", "-o", "."), "not a regular file"),
        (("in.jsonl", "-o", "out", "--model", "x", "--pid", "1"), "--model starts a llamasup"),
        (("in.jsonl", "-o", "out", "--", "--parallel", "1"), "need --model"),
        (("in.jsonl", "-o", "out", "--endpoint", "/x"), "cannot be used in a batch"),
        (("in.jsonl", "-o", "out", "--template", "none"), "cannot be read"),
        (("in.jsonl", "-o", "out", "--template", "in.jsonl"), "invalid JSON"),
        (("in.jsonl", "-o", "out", "--only-between", "night"), "22:00-07:00"),
        (("in.jsonl", "-o", "out", "--url", "http://[::1"), "is not a valid URL of a llamasup"),
    ],
)
def test_invalid_arguments_are_explained(
    own_folders: Path, source: Path, tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    done = run_to_end("batch", "run", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr


def test_batch_with_a_damaged_index_hides_no_other(
    fake_server: ServerMaker, tiny_model: Path, own_folders: Path, source: Path, tmp_path: Path
) -> None:
    damaged, good = tmp_path / "damaged.jsonl", tmp_path / "good.jsonl"
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        for output in (damaged, good):
            done = run_to_end("batch", "run", str(source), "-o", str(output), "--url", running.url)
            assert done.returncode == 0, done.stderr
        assert running.stop() == 0
    Path(f"{damaged}.index").write_bytes(b"no database " * 1000)
    states = {row["output"]: row["state"] for row in shown("list")["batches"]}
    assert states == {str(damaged): "unreadable", str(good): "completed"}


def test_unknown_batch_is_an_error(own_folders: Path) -> None:
    done = run_to_end("batch", "status", "batch_none")
    assert done.returncode == 66
    assert "There is no batch 'batch_none'" in done.stderr
    assert "no batches yet" in run_to_end("batch", "list").stderr


def test_model_that_is_not_served_is_a_mistake_in_the_input(
    fake_server: ServerMaker, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line(1) + "\n" + line(2, body={"prompt": "x", "model": "gpt-9"}))
    folder = str(tiny_model.parent)
    with started("serve", "--models-dir", folder, "--port", "0", "--runtime", fake_server()) as running:
        url = running.url
        done = run_to_end("batch", "run", str(source), "-o", str(tmp_path / "out"), "--url", url)
        assert running.stop() == 0
    assert done.returncode == 65
    assert "line 2 (1 lines): " in done.stderr
    assert "gpt-9" in done.stderr


def test_line_that_kills_its_server_is_set_aside_with_the_diagnosis(
    fake_server: ServerMaker, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    poison = {"body": {"prompt": "a poisonous line", "max_tokens": 2}}
    source.write_text("\n".join(line(number, **(poison if number == 7 else {})) for number in range(60)))
    server = fake_server("die_on=poisonous", "signal=stream:SIGSEGV")
    with llamasup(tiny_model, "--runtime", server) as running:
        done = run_to_end("batch", "run", str(source), "-o", str(output), "--url", running.url)
        assert running.stop() == 0
    assert done.returncode == 0, done.stderr
    assert "59 answers and 1 error" in done.stderr
    written = {one["custom_id"]: one for one in map(json.loads, output.read_text().splitlines())}
    assert len(written) == 60
    assert written["id7"]["response"] is None
    assert written["id7"]["error"]["code"] == "server_crashed"
    assert (
        "SIGSEGV" in written["id7"]["error"]["message"]
        or "segmentation" in written["id7"]["error"]["message"]
    )
