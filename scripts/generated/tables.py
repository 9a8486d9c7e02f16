"""The tables of causes, metrics, and states of an exchange."""

from __future__ import annotations

import re
from collections import defaultdict

from llamasup import errors
from llamasup.core.llama_server import diagnosis
from llamasup.core.observability.prometheus import own_families
from llamasup.core.proxy.exchange_states import TRANSITIONS, State
from scripts.pages import ROOT

# A diagnosis that no line of the log gives: where it is made, its cause and its exit code are literals.
_MADE = re.compile(r'Diagnosis\(\s*cause="(\w+)",(?:(?!Diagnosis\().)*?exit_code=(\d+)', re.DOTALL)
_HANGS = re.compile(r'_hang\(\s*"(\w+)"')
_HANG_CODE = 75
_METRIC_SUFFIXES = {"counter": "_total"}


def causes() -> str:
    """The causes of ``failed`` and ``exit``, by the exit code."""
    of_llamasup, of_server = defaultdict(set), defaultdict(set)
    for error_class in errors.ERRORS:
        if error_class is not errors.ServerFailed:
            of_llamasup[error_class.exit_code].add(error_class.cause)
    others = (diagnosis._OOM_KILLED, diagnosis._KILLED_BY, diagnosis._EXITED, diagnosis._UNKNOWN)
    for rule in (*diagnosis._RULES, *diagnosis._SIGNALS.values(), *others):
        of_server[rule.exit_code].add(rule.cause)
    for path in (ROOT / "llamasup").rglob("*.py"):
        source = path.read_text("utf-8")
        for cause, code in _MADE.findall(source):
            of_server[int(code)].add(cause)
        of_server[_HANG_CODE].update(_HANGS.findall(source))
    rows = ["| Exit code | Causes found by llamasup | Causes of the end of a llama-server |", "|---|---|---|"]
    for code in sorted({*of_llamasup, *of_server}):
        names = (", ".join(f"`{cause}`" for cause in sorted(of[code])) for of in (of_llamasup, of_server))
        rows.append(f"| {code} | {' | '.join(names)} |")
    return "\n".join(rows)


def metrics() -> str:
    """The metric families of /metrics."""
    rows = []
    for family in own_families():
        labels = ",".join(family._labelnames)  # type: ignore[attr-defined]
        name = family.name + _METRIC_SUFFIXES.get(family.type, "")
        rows.append(f"- `{name}{{{labels}}}`: {family.documentation}".replace("{}", ""))
    return "\n".join(rows)


def exchange_states() -> str:
    """The diagram of the states of an exchange."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.CONNECTING.value}"]
    for before, following in TRANSITIONS.items():
        lines += [f"    {before.value} --> {after.value}: {why}" for after, why in following.items()]
    return "\n".join([*lines, ""])
