"""Turn recorded requests into fixtures: their structure stays; texts, paths, names and ids are replaced.

The prompts of the programs belong to others. Of a text, only the number of its characters is kept, as
``{"$words": 120}``, and at most ``MOST`` of them: ``tests/kit/agent_requests.py`` puts words in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.extended.agents.programs import Program
from tests.extended.agents.recorder import Recorded
from tests.kit.agent_requests import FOLDER, MODEL, TOOLS, WORDS_KEY

__all__ = ["fixture_of"]

MOST = 400
"""Characters of a text. The gate has to read the prompts, and a prompt of 70,000 characters takes seconds."""
_KEPT_HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta")
_ALSO_HERE = ("authorization", "x-api-key", "user-agent")
# The strings below these names are words of a protocol, and say nothing about a machine or a person.
_KEPT = frozenset(
    {"role", "type", "name", "status", "tool_choice", "effort", "summary", "include", "format", "pattern"}
    | {"enum", "required", "const", "$schema", "$ref", "keep", "phase", "propertyNames"}
)
_IDS = frozenset({"id", "call_id", "tool_use_id", "tool_call_id", "prompt_cache_key", "user_id"})
_CALLS = frozenset({"arguments", "input"})  # of a call of the script: its texts are ours


def fixture_of(
    program: Program, requests: Sequence[Recorded], folder: str, calls: Sequence[Any]
) -> dict[str, Any]:
    """Return the content of a fixture, with the script that its model plays."""
    ids: dict[str, str] = {}
    posts = [_request(each, ids, folder) for each in requests if each.method == "POST"]
    tools: Any = next((each["body"]["tools"] for each in posts if "tools" in each["body"]), [])
    for each in posts:  # all of them have the same, which are most of a fixture
        if tools and each["body"].get("tools") == tools:
            each["body"]["tools"] = TOOLS
    return {
        "client": program.title,
        "version": program.version,
        "text": program.text,
        "calls": json.loads(json.dumps(calls).replace(folder, FOLDER)),
        "tools": tools,
        "requests": posts,
    }


def _request(request: Recorded, ids: dict[str, str], folder: str) -> dict[str, Any]:
    body = json.loads(request.body.decode().replace(folder, FOLDER))
    return {
        "method": request.method,
        "path": request.path,
        "headers": _headers(request.headers),
        "bytes": len(request.body),
        "body": {**{key: _plain(value, key, ids) for key, value in body.items()}, "model": MODEL},
    }


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    lower = {name.lower(): value for name, value in headers.items()}
    kept = {name: value for name, value in lower.items() if name in _KEPT_HEADERS}
    return kept | {name: "replaced" for name in _ALSO_HERE if name in lower}


def _plain(value: Any, key: str, ids: dict[str, str]) -> Any:
    if isinstance(value, str):
        return _text(value, key, ids)
    if isinstance(value, list):
        return [_plain(item, key if key in _KEPT else "", ids) for item in value]
    if isinstance(value, dict):
        if key in _CALLS and "type" not in value:
            return value
        if key == "client_metadata":
            return {}
        if key == "properties":  # the keys are names of arguments, not of fields
            return {name: _plain(item, "", ids) for name, item in value.items()}
        return {name: _plain(item, name, ids) for name, item in value.items()}
    return value


def _text(value: str, key: str, ids: dict[str, str]) -> Any:
    if key in _IDS:
        return ids.setdefault(value, f"id_{len(ids) + 1}")
    if key in _CALLS and value.startswith("{"):
        return value
    if key in _KEPT and re.fullmatch(r"\S{1,200}", value):
        return value
    return {WORDS_KEY: min(len(value), MOST)}
