"""What helps or hurts on this machine: facts in, checks out.

A check that is not ok names what will go wrong, or does already, and what to do about it. What could only be
better is ok, with the advice as its remedy: a laptop in its usual state is healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llamasup.doctor import machine as machine
from llamasup.doctor import server as server
from llamasup.doctor.facts import Check, Facts
from llamasup.system.text import printable

__all__ = ["as_json", "examine"]


def examine(facts: Facts) -> tuple[Check, ...]:
    """Every check that there is something to say to, in the order they are best read."""
    return tuple(check for look in _CHECKS for check in look(facts))


def as_json(checks: tuple[Check, ...]) -> dict[str, Any]:
    """The ``doctor`` object of the contract (docs/design.md)."""
    return {
        "ok": all(check.ok for check in checks),
        "checks": [
            # A path may hold bytes that are no UTF-8, which strict parsers refuse in JSON.
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


def _folders(facts: Facts) -> Iterator[Check]:
    for folder in facts.folders:
        name = f"{folder.name} folder"
        if folder.problem is not None:
            yield Check(name, False, folder.problem.message, folder.problem.remedy)
        else:
            yield Check(name, True, folder.path + (f" ({folder.note})" if folder.note else ""))


def _left(facts: Facts) -> Iterator[Check]:
    answering = [folder for folder in facts.left if folder.answering]
    if answering:
        sockets = " ".join(socket for folder in answering for socket in folder.answering)
        yield Check(
            "left behind",
            False,
            f"something still listens for a llamasup that has ended (pid {answering[0].pid}): {sockets}",
            "The next llamasup run ends it. Should it stay, see which process it is (ss -xlp).",
        )
    elif facts.left:
        paths = [folder.path for folder in facts.left]
        found = f"by a llamasup that was killed: {' '.join(paths)}"
        yield Check("left behind", True, found, "Nothing: the next llamasup run removes it.")
    else:
        yield Check("left behind", True, "nothing")


def _port(facts: Facts) -> Iterator[Check]:
    if (running := facts.running) is not None:
        models = ", ".join(running.models) or "nothing"
        found = f"{facts.port}: a llamasup (pid {running.pid}) serves {models} at {running.url}"
        yield Check("port", True, found, "To run another one, give it another port (--port 0: any free one).")
    elif facts.port_problem is not None:
        yield Check("port", False, facts.port_problem.message, facts.port_problem.remedy)
    else:
        yield Check("port", True, f"{facts.port} is free" if facts.port else "any free one")


def _certificate(facts: Facts) -> Iterator[Check]:
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
    server.check_runtimes,
    server.check_capabilities,
    server.check_model,
    server.check_devices,
    server.check_nvml,
    machine.check_memory,
    machine.check_locked_memory,
    machine.check_address_space,
    machine.check_cpu,
    machine.check_numa,
    machine.check_huge_pages,
    machine.check_priority,
    machine.check_open_files,
    _folders,
    _left,
    _port,
    _certificate,
    server.check_config_files,
    server.check_environment,
)
