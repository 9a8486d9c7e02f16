"""The API for batches, used by OpenAI's client as it is, on a real llama-server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from llamasup.features.batch.api.objects import ENDED
from tests.e2e.driver import Llamasup, started
from tests.kit.patience import eventually

KEYS = "sk-of-anna name=anna\nsk-of-ben name=ben\n"


def config_of(folder: Path, model: Path, runtime: str) -> Path:
    keys = folder / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    config = folder / "config.yaml"
    config.write_text(
        f"runtime: {runtime}\nauth: {{api_key_file: {keys}}}\n"
        f"models: {{tiny: {{path: {model}, parallel: 4}}}}\n"
        f"batches: {{enabled: true, max_file: 20MiB, max_files: 20}}\n"
    )
    return config


@contextmanager
def serving(config: Path) -> Iterator[Llamasup]:
    with started("serve", "--config", str(config), "--port", "0") as running:
        running.wait_for("ready")
        yield running


def client_of(running: Llamasup, name: str = "anna") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=f"sk-of-{name}", max_retries=0)


def write(path: Path, bodies: Sequence[Mapping[str, Any]], url: str = "/v1/completions") -> Path:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": {"model": "tiny", **body}}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prompts(count: int, **more: Any) -> list[Mapping[str, Any]]:
    return [
        {"prompt": f"Once there was a fox {n}", "max_tokens": 8, "temperature": 0, **more}
        for n in range(count)
    ]


def begin(client: openai.OpenAI, source: Path, endpoint: Any = "/v1/completions") -> Batch:
    with source.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", metadata={"for": "test"}
    )


def has_answers(client: openai.OpenAI, batch: Batch) -> bool:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts is not None and counts.completed > 0


def end(client: openai.OpenAI, batch: Batch) -> Batch:
    eventually(lambda: client.batches.retrieve(batch.id).status in ENDED, "the end of the batch")
    return client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_client_of_openai_runs_a_batch_to_its_end(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [*prompts(30), {"prompt": "no", "max_tokens": "many"}])
    with (
        serving(config_of(tmp_path, tiny_model, runtime)) as running,
        client_of(running) as anna,
        client_of(running, "ben") as ben,
    ):
        batch = begin(anna, source)
        assert batch.status in ("validating", "in_progress")
        assert batch.metadata == {"for": "test"}
        over = end(anna, batch)
        assert over.status == "completed", over
        counts = over.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (31, 30, 1)
        answers = lines_of(anna, over.output_file_id)
        assert {one["custom_id"] for one in answers} == {f"line-{n}" for n in range(30)}
        assert all(one["response"]["body"]["choices"][0]["text"] for one in answers)
        (failure,) = lines_of(anna, over.error_file_id)
        assert failure["custom_id"] == "line-30"
        assert failure["response"]["status_code"] == 400

        assert [one.id for one in anna.batches.list()] == [batch.id]
        assert over.output_file_id in [one.id for one in anna.files.list(limit=1)]
        assert [one.id for one in anna.files.list(purpose="batch")] == [batch.input_file_id]
        assert anna.files.retrieve(batch.input_file_id).bytes == source.stat().st_size
        assert list(ben.batches.list()) == []
        with pytest.raises(openai.NotFoundError):
            ben.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            ben.files.content(over.output_file_id or "")
        assert anna.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            anna.files.retrieve(batch.input_file_id)
        assert running.stop() == 0


def test_run_serves_the_api_of_batches_for_its_model(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", prompts(12))
    words = ("run", str(tiny_model), "--runtime", runtime, "--port", "0", "--batches")
    with started(*words) as running, client_of(running) as client:
        running.wait_for("ready")
        # one llamasup at a time uses the folder of the batches
        with started(*words) as other, client_of(other) as refused_client:
            other.wait_for("ready")
            with pytest.raises(openai.APIStatusError) as refused:
                refused_client.batches.list()
            assert refused.value.status_code == 409
            assert "Another llamasup serves the batches" in refused.value.message
            assert other.stop() == 0
        over = end(client, begin(client, source))
        assert over.status == "completed", over
        assert len(lines_of(client, over.output_file_id)) == 12
        assert running.stop() == 0


def test_mistakes_of_the_input_fail_the_batch_by_line(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"custom_id": "1"}\nno JSON\n')
    with serving(config_of(tmp_path, tiny_model, runtime)) as running, client_of(running) as client:
        over = end(client, begin(client, wrong))
        assert over.status == "failed"
        assert over.errors is not None
        assert [error.line for error in over.errors.data or ()] == [1, 2]
        over = end(client, begin(client, write(tmp_path / "other.jsonl", prompts(1)), "/v1/embeddings"))
        assert over.status == "failed"
        assert over.errors is not None
        assert "endpoint" in str((over.errors.data or [])[0].message)
        unknown = write(tmp_path / "unknown.jsonl", [{"model": "other", "prompt": "x"}])
        over = end(client, begin(client, unknown))
        assert over.status == "failed"
        assert over.errors is not None
        assert "other" in str((over.errors.data or [])[-1].message)
        with pytest.raises(openai.BadRequestError):
            client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=b"x" * (21 << 20), purpose="batch")
        assert refused.value.status_code == 413
        assert running.stop() == 0


def test_batch_is_cancelled_with_its_answers_so_far(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    bodies = [*prompts(4), *prompts(196, max_tokens=2000, ignore_eos=True)]
    with serving(config_of(tmp_path, tiny_model, runtime)) as running, client_of(running) as client:
        batch = begin(client, write(tmp_path / "in.jsonl", bodies))
        waiting = begin(client, write(tmp_path / "in.jsonl", bodies))
        eventually(lambda: has_answers(client, batch), "an answer")
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(waiting.id).status == "cancelled"
        assert client.batches.cancel(batch.id).status == "cancelling"
        over = end(client, batch)
        assert over.status == "cancelled"
        answers, failures = (lines_of(client, id_) for id_ in (over.output_file_id, over.error_file_id))
        assert answers
        assert {one["error"]["code"] for one in failures} == {"batch_cancelled"}
        ids = [one["custom_id"] for one in (*answers, *failures)]
        assert sorted(ids) == sorted(f"line-{n}" for n in range(200))
        assert running.stop() == 0


def test_batch_continues_after_llamasup_was_killed(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, tiny_model, runtime)
    source = write(tmp_path / "in.jsonl", prompts(400))
    with serving(config) as running, client_of(running) as client:
        batch = begin(client, source)
        eventually(lambda: has_answers(client, batch), "an answer")
        os.kill(running.pid, signal.SIGKILL)
        running.end()
    with serving(config) as running, client_of(running) as client:
        over = end(client, batch)
        assert over.status == "completed"
        ids = [one["custom_id"] for one in lines_of(client, over.output_file_id)]
        assert sorted(ids) == sorted(f"line-{n}" for n in range(400))
        assert running.stop() == 0
