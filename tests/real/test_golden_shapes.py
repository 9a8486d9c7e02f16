"""The JSON that llamasup shows, against the fields in ``tests/golden/shapes.json``.

A field may be added: run this test with LLAMASUP_WRITE_GOLDEN=1, and commit the file. A field that is
missing, or has another type, breaks the programs of users.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from tests.e2e.driver import PATIENCE_S, run_to_end, started

GOLDEN = Path(__file__).parents[1] / "golden" / "shapes.json"
WRITE = "LLAMASUP_WRITE_GOLDEN"
CONTROL = (
    *("status", "memory", "requests", "history", "config", "decisions", "usage", "upgrade"),
    *("models/tiny/why", "models/second/why"),
)
OLLAMA = ("/api/version", "/api/tags", "/api/ps")


def paths(value: object, path: str = "") -> Iterator[str]:
    """Each place of a JSON value with its type. A null has any type, and an empty list any items."""
    match value:
        case dict():
            yield f"{path}: object"
            for key, item in value.items():
                yield from paths(item, f"{path}.{key}")
        case list():
            yield f"{path}: list"
            for item in value:
                yield from paths(item, f"{path}[]")
        case None:
            yield f"{path}: null"
        case bool():
            yield f"{path}: bool"
        case int() | float():
            yield f"{path}: number"
        case _:
            yield f"{path}: string"


def shape(*values: Any) -> list[str]:
    """The places of values of the same kind."""
    places = {place for value in values for place in paths(value)}
    known = {place.rpartition(":")[0] for place in places if not place.endswith(": null")}
    return sorted(
        place for place in places if not (place.endswith(": null") and place.rpartition(":")[0] in known)
    )


def metric_names(text: str) -> list[str]:
    """The samples of llamasup's own metrics, with the names of their labels."""
    return sorted(
        {
            f"{sample.name}{{{','.join(sorted(sample.labels))}}}"
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("llamasup_")
        }
    )


def control_shapes(socket: str) -> dict[str, list[str]]:
    with httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=socket)) as client:
        answers = {path: client.get(f"/llamasup/v1/{path}").raise_for_status() for path in CONTROL}
    return {f"GET /llamasup/v1/{path}": shape(answer.json()) for path, answer in answers.items()}


@pytest.fixture
def shown(llama_server: str, tiny_model: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Everything that a served model, a crash and a stop show."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("tiny", "second"):
        shutil.copy(tiny_model, folder / f"{name}.gguf")
    options = (
        *("--models-dir", str(folder), "--runtime", llama_server),
        *("--port", "0", "--ollama=127.0.0.1:0"),
    )
    found: dict[str, list[str]] = {}
    with started("serve", *options) as running:
        ready = running.wait_for("ready")
        with httpx.Client(base_url=str(ready["url"]), timeout=PATIENCE_S) as http:
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            http.post("/v1/chat/completions", json=chat).raise_for_status()
            (child,) = (one for one in running.children() if "tiny.gguf" in " ".join(one.cmdline()))
            child.send_signal(signal.SIGKILL)
            running.wait_for_ready_after(1)
            http.post("/v1/chat/completions", json=chat).raise_for_status()
            psutil.wait_procs([child], PATIENCE_S)
            found |= control_shapes(select_running(discover(), running.pid).socket)
            found["GET /v1/models"] = shape(http.get("/v1/models").json())
            found["GET /health"] = shape(http.get("/health").json())
            found["GET /metrics"] = metric_names(http.get("/metrics").text)
            missing = http.post("/v1/chat/completions", json={**chat, "model": "none"})
            found[f"{missing.status_code} of a model that is not served"] = shape(missing.json())
        with httpx.Client(base_url=str(ready["ollama"]), timeout=PATIENCE_S) as http:
            for path in OLLAMA:
                found[f"GET {path} of Ollama's API"] = shape(http.get(path).json())
            found["POST /api/show of Ollama's API"] = shape(
                http.post("/api/show", json={"model": "tiny"}).json()
            )
        for words in (
            ("status",),
            ("ps",),
            ("why", "tiny"),
            ("list", str(folder)),
            ("inspect", str(tiny_model)),
            ("plan", str(tiny_model), "--runtime", llama_server),
        ):
            output = run_to_end(*words, "--json").stdout
            found[f"llamasup {words[0]} --json"] = shape(json.loads(output))
        assert running.stop() == 0
        by_event: dict[str, list[Any]] = {}
        for event in running.all_events():
            by_event.setdefault(str(event["event"]), []).append(event)
    by_event.pop("progress", None)  # a fast machine shows none
    return found | {f"event {name}": shape(*events) for name, events in by_event.items()}


def any_type(place: str) -> str:
    return place.rpartition(":")[0]


def test_fields_that_users_read_are_all_there(shown: dict[str, list[str]]) -> None:
    if os.environ.get(WRITE):
        GOLDEN.write_text(json.dumps(shown, indent=1, sort_keys=True) + "\n")
    golden: dict[str, list[str]] = json.loads(GOLDEN.read_text())
    differences = []
    for source in sorted({*golden, *shown}):
        expected, present = set(golden.get(source, ())), set(shown.get(source, ()))
        anything = {any_type(place) for place in (*expected, *present) if place.endswith(": null")}
        for sign, places in (("-", expected - present), ("+", present - expected)):
            differences += [
                f"{sign} {source}: {place}"
                for place in sorted(places)
                if not any(
                    any_type(place) == one or place.startswith((f"{one}.", f"{one}[")) for one in anything
                )
            ]
    assert not differences, "\n".join([*differences, f"see {GOLDEN.name} in this module's docstring"])
