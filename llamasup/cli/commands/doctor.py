"""``llamasup doctor``: looks at what can go wrong on this machine, and says what to do.

Starts no server. Makes llamasup's own folders where there are none, to see whether they can be had.
"""

from __future__ import annotations

import os
from pathlib import Path

from llamasup.cli.errors import guarded
from llamasup.cli.output.layout import hanging, stdout_columns
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, while_waiting
from llamasup.doctor.facts import Check
from llamasup.doctor.report import as_json, examine
from llamasup.errors import LlamasupError, UsageInvalid
from llamasup.system.text import json_text, printable

__all__ = ["doctor_command"]


def doctor_command(
    model: str | None, *, runtime: str | None, port: int, json: bool, tls_cert: Path | None = None
) -> int:
    """Print every check. Returns 0 if all is well, 1 if something is not."""
    from llamasup.doctor.collect import gather

    def act(view: View) -> int:
        problem = _port_problem(port)
        with while_waiting(view, "asking the runtimes and their devices"):  # a driver may take 20 s
            facts = gather(
                model,
                runtime=runtime,
                port=port,
                port_problem=problem,
                environ=os.environ,
                tls_cert=tls_cert,
            )
        checks = examine(facts)
        write_result(json_text(as_json(checks), indent=2) if json else _as_text(checks, stdout_columns()))
        return 0 if all(check.ok for check in checks) else 1

    return guarded(act)


def _port_problem(port: int) -> LlamasupError | None:
    """Why ``run`` could not listen there, as it would say itself."""
    from llamasup.proxy.bind import bind

    if not 0 <= port <= 65535:
        raise UsageInvalid(f"--port {port} is no port.", remedy="Give 1 to 65535, or 0 for any free one.")
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
    bad = sum(not check.ok for check in checks)
    lines.append("All is well." if not bad else f"{bad} of {len(checks)} checks found what will hurt.")
    return "\n".join(lines)
