"""Counts the chat templates with which llama-server takes a conversation with malformed tool calls.

python scripts/repair_templates.py FOLDER --runtime PATH [--write]

FOLDER: models/templates of llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from llamasup.features.repair.history import with_valid_arguments
from scripts.pages import write_between
from tests.features.repair.conversations import BAD_ARGUMENTS, conversation
from tests.kit.models import tiny_decoder
from tests.real.bare_server import bare_server

PAGE = Path(__file__).resolve().parent.parent / "docs" / "repair.md"
MARKS = "<!-- templates: scripts/repair_templates.py --write -->", "<!-- /templates -->"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--write", action="store_true", help="write the table into docs/repair.md")
    args = parser.parse_args()
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    templates = sorted(args.folder.glob("*.jinja"))
    with tempfile.TemporaryDirectory(prefix="repair-") as home:
        (Path(home) / "tiny.gguf").write_bytes(tiny_decoder())
        for template in templates:
            for arguments, (as_is, repaired) in statuses(args.runtime, template, Path(home)).items():
                before[arguments] += as_is == 200
                after[arguments] += repaired == 200
    lines = [
        "| Arguments of the call | Templates that take the conversation | Repaired |",
        "|---|---:|---:|",
        *(
            f"| `{json.dumps(text)}` | {before[text]} of {len(templates)} | {after[text]} |"
            for text in before
        ),
    ]
    table = "\n".join(lines)
    print(table)
    if args.write:
        write_between(PAGE, MARKS, f"\n{table}\n")


if __name__ == "__main__":
    main()
