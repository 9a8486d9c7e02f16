"""Checks this machine for problems, and shows a remedy for each (``llamasup doctor``).

Starts no server. Creates llamasup's own folders if they are missing, to see whether that is possible.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from llamasup.cli.command_group import argument, command_set, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import whole_number
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import hanging, stdout_columns
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, while_waiting
from llamasup.core.system.text import json_text, printable
from llamasup.errors import LlamasupError, OutputFailed, UsageInvalid
from llamasup.features.doctor.facts import Check, Facts
from llamasup.features.doctor.report import as_json, run_checks

commands = command_set()

STDOUT = Path("-")

Model = Annotated[str | None, argument("MODEL", "Also check whether this model can be served.")]
Port = Annotated[int, option("--port", "N", "Check whether this port is free.", read=whole_number)]
Report = Annotated[
    Path | None,
    option(
        "--report",
        "FILE",
        "Also write a file for a bug report, without prompts and keys ('-': to standard output).",
    ),
]
Certificate = Annotated[
    Path | None, option("--tls-cert", "PATH", "Also check the dates of the certificate in this PEM file.")
]


@commands.command()
@guarded
def doctor(
    view: View,
    model: Model = None,
    runtime: o.RuntimeOption = None,
    port: Port = 8080,
    tls_cert: Certificate = None,
    report: Report = None,
    json: o.Json = False,
) -> int:
    """Check this machine for problems, and show a remedy for each.

    The checks look at runtimes, devices, memory, limits, folders and the port. The exit code is 1 if a
    check fails.
    """
    from llamasup.features.doctor.collect import collect_facts

    if report == STDOUT and json:
        raise UsageInvalid(
            "--json and --report - both write to standard output.",
            remedy="Leave one of them out, or give --report a file.",
        )
    problem = _port_problem(port)
    with while_waiting(view, "checking the runtimes and their devices"):  # a driver may take 20 s
        facts = collect_facts(
            model,
            runtime=runtime,
            port=port,
            port_problem=problem,
            environ=os.environ,
            tls_cert=tls_cert,
        )
    checks = run_checks(facts)
    if report is not None:
        _write_report(view, report, facts, checks)
    if report != STDOUT:
        write_result(json_text(as_json(checks), indent=2) if json else _as_text(checks, stdout_columns()))
    return 0 if all(check.ok for check in checks) else 1


def _write_report(view: View, target: Path, facts: Facts, checks: Sequence[Check]) -> None:
    from llamasup.core.system.storage.folders import atomic_write
    from llamasup.features.doctor.bug_report import bug_report
    from llamasup.features.doctor.collect_running import collect_running, versions

    text = bug_report(
        versions=versions(),
        checks=checks,
        plan=None if facts.model is None else facts.model.plan,
        running=collect_running(),
        environ=os.environ,
        home=str(Path.home()),
    )
    if target == STDOUT:
        write_result(text.rstrip("\n"))
        return
    try:
        atomic_write(target, text.encode())
    except OSError as error:
        raise OutputFailed(
            f"Cannot write the report to {str(target)!r}: {error.strerror}.", remedy="Give another file."
        ) from None
    view.say("info", "doctor", f"The report is in {target}. Read it before you publish it")


def _port_problem(port: int) -> LlamasupError | None:
    """Return the error that ``run`` would have with this port."""
    from llamasup.core.proxy.listeners.bind import bind

    if not 0 <= port <= 65535:
        raise UsageInvalid(f"Invalid --port {port}.", remedy="Give 1 to 65535, or 0 for any free port.")
    try:
        for sock in bind("127.0.0.1", port):
            sock.close()
    except LlamasupError as error:
        return error
    return None


def _as_text(checks: Sequence[Check], columns: int | None) -> str:
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        start = f"{'ok' if check.ok else '!!'}  {check.name:<{width}}  "
        lines.append(hanging(start, printable(check.found), columns=columns))
        if check.remedy:
            lines.append(hanging(f"    {'':<{width}}  → ", printable(check.remedy), columns=columns))
    failed = sum(not check.ok for check in checks)
    lines.append(f"{failed} of {len(checks)} checks found a problem." if failed else "No problems found.")
    return "\n".join(lines)
