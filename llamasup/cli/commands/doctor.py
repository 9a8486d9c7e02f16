"""``llamasup doctor``: checks this machine for problems, and shows a remedy for each.

Starts no server. Creates llamasup's own folders if they are missing, to see whether that is possible.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import whole_number
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import hanging, stdout_columns
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, while_waiting
from llamasup.doctor.facts import Check
from llamasup.doctor.report import as_json, run_checks
from llamasup.errors import LlamasupError, UsageInvalid
from llamasup.system.text import json_text, printable

__all__ = ["commands"]

commands = command_set()

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Also check whether this model can be served.", show_default=False),
]
Port = Annotated[
    int, typer.Option("--port", parser=whole_number, metavar="N", help="Check whether this port is free.")
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", metavar="PATH", help="Also check the dates of the certificate in this PEM file."
    ),
]


@commands.command()
def doctor(
    model: Model = None,
    runtime: o.RuntimeOption = None,
    port: Port = 8080,
    tls_cert: Certificate = None,
    json: o.Json = False,
) -> int:
    """Check this machine for problems, and show a remedy for each.

    The checks look at runtimes, devices, memory, limits, folders and the port. The exit code is 1 if a
    check fails.
    """
    from llamasup.doctor.collect import collect_facts

    def act(view: View) -> int:
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
        write_result(json_text(as_json(checks), indent=2) if json else _as_text(checks, stdout_columns()))
        return 0 if all(check.ok for check in checks) else 1

    return guarded(act)


def _port_problem(port: int) -> LlamasupError | None:
    """The error that ``run`` would have with this port."""
    from llamasup.proxy.bind import bind

    if not 0 <= port <= 65535:
        raise UsageInvalid(f"Invalid --port {port}.", remedy="Give 1 to 65535, or 0 for any free port.")
    try:
        for sock in bind("127.0.0.1", port):
            sock.close()
    except LlamasupError as error:
        return error
    return None


def _as_text(checks: tuple[Check, ...], columns: int | None) -> str:
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
