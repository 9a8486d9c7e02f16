"""Counts the answers that cannot be used, without and with the repair, of a real llama-server.

python scripts/repair_answers.py --runtime PATH [--write]

The model is the tiny one with random weights. Many of its answers are wrong: by a format that only half of
the words match, and by a part of a JSON schema that no grammar has
(``tests/features/repair/unusable_answers.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from scripts.pages import write_between
from tests.e2e.driver import llamasup
from tests.features.repair.unusable_answers import UNPARSED, UNPARSED_OPTIONS, WRONG_JSON
from tests.kit.models import tiny_decoder

PAGE = Path(__file__).resolve().parent.parent / "docs" / "repair.md"
MARKS = "<!-- answers: scripts/repair_answers.py --write -->", "<!-- /answers -->"
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
    """How many of the answers are usable."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--write", action="store_true", help="write the table into docs/repair.md")
    args = parser.parse_args()
    lines = ["| Answer | Usable without the repair | With it |", "|---|---:|---:|"]
    with tempfile.TemporaryDirectory(prefix="repair-") as home:
        model = Path(home) / "tiny.gguf"
        model.write_bytes(tiny_decoder())
        for name, setting, body, is_usable, extra in (
            ("500, because it does not match the format", "tools", UNPARSED, is_parsed, UNPARSED_OPTIONS),
            ("does not match its JSON schema", "json", WRONG_JSON, is_right_json, ()),
        ):
            counts = [
                usable(model, ("--runtime", args.runtime, "--repair", repair, "--", *extra), body, is_usable)
                for repair in ("off", setting)
            ]
            lines.append(f"| {name} (`{setting}`) | {counts[0]} of {REQUESTS} | {counts[1]} |")
    table = "\n".join(lines)
    print(table)
    if args.write:
        write_between(PAGE, MARKS, f"\n{table}\n")


if __name__ == "__main__":
    main()
