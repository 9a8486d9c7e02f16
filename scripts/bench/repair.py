"""Count unusable answers and refused conversations of a real llama-server, without and with the repair.

    python -m scripts.bench repair --runtime PATH [--write]
    python -m scripts.bench repair --runtime PATH --templates FOLDER [--write]

The model is the tiny one with random weights. Many of its answers are wrong: by a format that only half of
the words match, and by a part of a JSON schema that no grammar has
(``tests/features/repair/unusable_answers.py``).

With ``--templates``, it counts the chat templates of models/templates of llama.cpp with which llama-server
takes a conversation with malformed tool calls.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from llamasup.features.repair.history import with_valid_arguments
from scripts.menu import publish
from tests.e2e.driver import llamasup
from tests.features.repair.conversations import BAD_ARGUMENTS, conversation
from tests.features.repair.unusable_answers import UNPARSED, UNPARSED_OPTIONS, WRONG_JSON
from tests.kit.models import tiny_decoder
from tests.real.bare_server import bare_server

PAGE = "measurements.md"
REQUESTS = 200


def is_parsed(answer: httpx.Response) -> bool:
    return answer.status_code == 200


def is_right_json(answer: httpx.Response) -> bool:
    return json.loads(answer.json()["choices"][0]["message"]["content"]) in {2, 3, 4}


def usable(
    model: Path,
    options: tuple[str, ...],
    body: Mapping[str, Any],
    is_usable: Callable[[httpx.Response], bool],
) -> int:
    """Count the usable answers."""
    with llamasup(model, *options) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        running.wait_for("ready")
        return sum(
            is_usable(
                client.post(
                    "/v1/chat/completions",
                    json={**body, "seed": seed},
                    headers={"X-Request-Id": f"request-{seed}"},
                )
            )
            for seed in range(REQUESTS)
        )


def answers(runtime: str) -> str:
    lines = ["| Answer | Usable without the repair | With it |", "|---|---:|---:|"]
    with tempfile.TemporaryDirectory(prefix="repair-") as home:
        model = Path(home) / "tiny.gguf"
        model.write_bytes(tiny_decoder())
        for name, setting, body, is_usable, extra in (
            ("500, because it does not match the format", "tools", UNPARSED, is_parsed, UNPARSED_OPTIONS),
            ("does not match its JSON schema", "json", WRONG_JSON, is_right_json, ()),
        ):
            counts = [
                usable(model, ("--runtime", runtime, "--repair", repair, "--", *extra), body, is_usable)
                for repair in ("off", setting)
            ]
            lines.append(f"| {name} (`{setting}`) | {counts[0]} of {REQUESTS} | {counts[1]} |")
    return "\n".join(lines)


def statuses(runtime: str, template: Path, home: Path) -> dict[str, tuple[int, int]]:
    """By arguments: the status of the conversation without and with the repair."""
    path = home / "s.sock"
    options = ("-m", str(home / "tiny.gguf"), "-c", "512", "--jinja", "--chat-template-file", str(template))
    found = {}
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        bare_server(runtime, path, *options),
        httpx.Client(transport=transport, base_url="http://x", timeout=60) as client,
    ):
        for arguments in ('{"city": "Paris"}', *BAD_ARGUMENTS):
            body = json.dumps(conversation(arguments)).encode()
            bodies = (body, with_valid_arguments(body) or body)
            before, after = (client.post("/apply-template", content=one).status_code for one in bodies)
            found[arguments] = (before, after)
    path.unlink(missing_ok=True)
    return found


def templates(runtime: str, folder: Path) -> str:
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    files = sorted(folder.glob("*.jinja"))
    with tempfile.TemporaryDirectory(prefix="repair-") as home:
        (Path(home) / "tiny.gguf").write_bytes(tiny_decoder())
        for template in files:
            for arguments, (as_is, repaired) in statuses(runtime, template, Path(home)).items():
                before[arguments] += as_is == 200
                after[arguments] += repaired == 200
    lines = ["| Arguments of the call | Templates that take the conversation | Repaired |", "|---|---:|---:|"]
    for name, texts in (("valid", ['{"city": "Paris"}']), ("malformed", BAD_ARGUMENTS)):
        counts = (spread_of([counted[text] for text in texts]) for counted in (before, after))
        lines.append(f"| {name} | {' | '.join(f'{count} of {len(files)}' for count in counts)} |")
    return "\n".join(lines)


def spread_of(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", required=True, help="a llama-server")
    parser.add_argument("--templates", type=Path, metavar="FOLDER", help="models/templates of llama.cpp")


def main(options: argparse.Namespace) -> None:
    if options.templates:
        publish(options, templates(options.runtime, options.templates), "repair-templates")
    else:
        publish(options, answers(options.runtime), "repair-answers")
