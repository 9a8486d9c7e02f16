"""The file that ``llamasup doctor --report`` writes for a bug report (pure).

It holds versions, the checks, the plan of a model, and of each running llamasup its status with the last
events, and the log lines that cannot quote a request. Keys and the name of the home folder are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from llamasup.core.system.text import json_text, printable
from llamasup.features.doctor.facts import Check

_INTRODUCTION = """\
Written by `llamasup doctor --report`. It contains no prompts, answers or keys, but names of models and
folders: read it before you publish it."""
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_MIN_SECRET = 6  # a shorter value, such as "1", also occurs as something else
# What follows the name of an option, also as the next word of a JSON list, of a header or of a part of a URL;
# the user of a URL; and keys of well-known services.
_NAMED = re.compile(
    r"""((?:--api-key|--hf-token|-hft)(?:[ =]|",\s*")|[Bb]earer |[?&](?:api_?key|key|token)=)[^\s"&]+"""
)
_USER = re.compile(r"(?<=://)[^/\s@\"]+@")
_KEY = re.compile(r"\b(?:sk|hf|gsk|xai|ghp|pk)[-_][\w-]{8,}")


class RunningReport(Struct, frozen=True):
    """A running llamasup. ``logs``: the shareable lines by model. ``problem``: why it did not answer."""

    pid: int
    status: Mapping[str, Any] | None = None
    logs: Mapping[str, Sequence[str]] = {}
    problem: str = ""


def bug_report(
    *,
    versions: Mapping[str, str],
    checks: Iterable[Check],
    plan: Mapping[str, Any] | None,
    running: Iterable[RunningReport],
    environ: Mapping[str, str],
    home: str,
) -> str:
    """Write the report, in Markdown. ``plan``: of the model that the user named."""
    sections = [
        "# llamasup bug report",
        _INTRODUCTION,
        _section("Versions", "\n".join(f"{name} {version}" for name, version in versions.items())),
        _section("Checks", "\n".join(map(_check_text, checks))),
    ]
    if plan is not None:
        sections.append(_section("Plan", json_text(plan, indent=2), "json"))
    for process in running:
        title = f"Running llamasup, process {process.pid}"
        if process.status is None:
            sections.append(_section(title, process.problem))
            continue
        sections.append(_section(title, json_text(process.status, indent=2), "json"))
        for model, lines in process.logs.items():
            sections.append(_section(f"Log of {model}, without lines about requests", "\n".join(lines)))
    return _redacted("\n\n".join(sections) + "\n", environ, home)


def _section(title: str, text: str, kind: str = "text") -> str:
    shown = "\n".join(map(printable, text.split("\n")))
    return f"## {printable(title)}\n\n````{kind}\n{shown or '(nothing)'}\n````"


def _check_text(check: Check) -> str:
    remedy = f" → {check.remedy}" if check.remedy else ""
    return f"{'ok' if check.ok else '!!'} {check.name}: {check.found}{remedy}"


def _redacted(text: str, environ: Mapping[str, str], home: str) -> str:
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET:
            for written in (value, json_text(value)[1:-1], printable(value)):
                text = text.replace(written, "***")
    text = _KEY.sub("***", _USER.sub("***@", _NAMED.sub(r"\1***", text)))
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
    return text
