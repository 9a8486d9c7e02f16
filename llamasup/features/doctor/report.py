"""All checks of ``llamasup doctor``: facts in, results out.

A failed check names a problem and its remedy. A passed check may have a remedy too, as advice: an ordinary
laptop passes all checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llamasup.core.system.text import printable
from llamasup.features.doctor.checks import (
    check_address_space,
    check_capabilities,
    check_config_files,
    check_cpu,
    check_devices,
    check_environment,
    check_ffmpeg,
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_model,
    check_numa,
    check_nvml,
    check_open_files,
    check_priority,
    check_runtimes,
)
from llamasup.features.doctor.facts import Check, Facts


def run_checks(facts: Facts) -> tuple[Check, ...]:
    """Return the results that apply to this machine, in the order of the report."""
    return tuple(result for check in _CHECKS for result in check(facts))


def as_json(checks: tuple[Check, ...]) -> dict[str, Any]:
    """Return the ``doctor`` object of the contract (docs/design.md)."""
    return {
        "ok": all(check.ok for check in checks),
        "checks": [
            # A path may contain bytes other than UTF-8, which strict JSON parsers refuse.
            {
                "name": check.name,
                "ok": check.ok,
                "found": printable(check.found),
                "remedy": printable(check.remedy),
            }
            for check in checks
        ],
    }


# --- what llamasup itself needs ------------------------------------------------------------------


def _check_folders(facts: Facts) -> Iterator[Check]:
    for folder in facts.folders:
        name = f"{folder.name} folder"
        if folder.problem is not None:
            yield Check(name, False, folder.problem.message, folder.problem.remedy)
        else:
            yield Check(name, True, folder.path + (f" ({folder.note})" if folder.note else ""))


def _check_left_folders(facts: Facts) -> Iterator[Check]:
    answering = [folder for folder in facts.left_folders if folder.answering]
    if answering:
        sockets = " ".join(socket for folder in answering for socket in folder.answering)
        yield Check(
            "left behind",
            False,
            f"a process of a llamasup that has ended (pid {answering[0].pid}) still listens: {sockets}",
            "The next llamasup run ends it. If it remains, find the process (ss -xlp).",
        )
    elif facts.left_folders:
        paths = " ".join(folder.path for folder in facts.left_folders)
        found = f"by a llamasup that was killed: {paths}"
        yield Check("left behind", True, found, "Nothing to do: the next llamasup run removes it.")
    else:
        yield Check("left behind", True, "nothing")


def _check_port(facts: Facts) -> Iterator[Check]:
    if (running := facts.running) is not None:
        models = ", ".join(running.models) or "nothing"
        found = f"{facts.port}: a llamasup (pid {running.pid}) serves {models} at {running.url}"
        yield Check(
            "port", True, found, "To run another llamasup, give it another port (--port 0: any free port)."
        )
    elif facts.port_problem is not None:
        yield Check("port", False, facts.port_problem.message, facts.port_problem.remedy)
    else:
        yield Check("port", True, f"{facts.port} is free" if facts.port else "any free port")


def _check_certificate(facts: Facts) -> Iterator[Check]:
    if (certificate := facts.certificate) is None:
        return
    if not certificate.problem:
        yield Check("certificate", True, f"{certificate.path} is valid until {certificate.ends}")
        return
    remedy = "Clients reject it. Renew it, or correct the clock of this machine."
    if certificate.is_current:
        remedy = "Renew it before that date. A running llamasup loads the new file by itself."
    elif not certificate.ends:
        remedy = "Give a PEM file with the certificate, followed by its chain."
    yield Check("certificate", certificate.is_current, f"{certificate.path} {certificate.problem}", remedy)


_CHECKS: tuple[Callable[[Facts], Iterator[Check]], ...] = (
    check_runtimes,
    check_capabilities,
    check_ffmpeg,
    check_model,
    check_devices,
    check_nvml,
    check_memory,
    check_locked_memory,
    check_address_space,
    check_cpu,
    check_numa,
    check_huge_pages,
    check_priority,
    check_open_files,
    _check_folders,
    _check_left_folders,
    _check_port,
    _check_certificate,
    check_config_files,
    check_environment,
)
