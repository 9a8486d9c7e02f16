"""The RPC workers of a model: their addresses, their answers, and which of them a start uses (pure).

A worker is llama.cpp's ``rpc-server``, or leads to one through a tunnel (``ask.py``). It serves one client
at a time: while a llama-server uses it, it answers no other one (b11434).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs
from llamasup.core.llama_server.diagnosis import WORKER_LOST, Diagnosis
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.text import memory_text
from llamasup.errors import WorkerMissing

_DEVICE = "RPC"  # llama-server numbers the devices of all workers: RPC0, RPC1, …


class TunnelFiles(Struct, frozen=True):
    """PEM files of this end of a tunnel, absolute: the CA of the other end, own certificate and key."""

    ca: str
    cert: str
    key: str


class WorkerAnswer(Struct, frozen=True):
    """The answer of a worker. ``endpoint``: how llama-server reaches it. ``devices``: as it lists them.

    ``state``: ``busy`` connected, but no answer: it serves another llama-server, or hangs.
    ``problem``: why it does not answer.
    """

    address: str
    endpoint: str
    state: Literal["ready", "busy", "absent"]
    devices: tuple[Device, ...] = ()
    problem: str = ""


class Workers(Struct, frozen=True):
    """The workers that a start uses, and the workers that are missing.

    ``excluded``: why the model's other settings exclude all of them; empty if they do not.
    """

    used: tuple[WorkerAnswer, ...] = ()
    missing: tuple[WorkerAnswer, ...] = ()
    excluded: str = ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices as llama-server numbers them: in the order of ``--rpc``."""
        found = [device for answer in self.used for device in answer.devices]
        return tuple(replace(device, name=f"{_DEVICE}{number}") for number, device in enumerate(found))

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(answer.address for answer in self.used)


NO_WORKERS = Workers()


def why_excluded(extra_args: ExtraArgs, gpu_layers: int | str | None) -> str:
    """Return the reason why no layer can be on a worker, so that none is asked; empty if layers can."""
    devices = extra_args.value("--device")
    if devices is not None and not _names_workers(devices):
        return f"--device {devices} excludes them"
    layers = extra_args.value("--gpu-layers") or gpu_layers
    return "with 0 GPU layers, no layer is on a device" if str(layers) == "0" else ""


def need_every_worker(extra_args: ExtraArgs) -> bool:
    """Return whether the user chose devices by number: a missing worker would change the other numbers."""
    return _names_workers(extra_args.value("--device") or "")


def _names_workers(devices: str) -> bool:
    return any(name.startswith(_DEVICE) for name in devices.split(","))


def choose_workers(answers: Sequence[WorkerAnswer], *, is_start: bool) -> Workers:
    """Choose the workers of a start.

    With ``is_start`` false it is only an estimate, for which the last answer of a busy worker counts.
    """

    def usable(answer: WorkerAnswer) -> bool:
        return answer.state == "ready" or (not is_start and answer.state == "busy" and bool(answer.devices))

    return Workers(
        tuple(answer for answer in answers if usable(answer)),
        tuple(answer for answer in answers if not usable(answer)),
    )


def give_workers(line: CommandLine, workers: Workers) -> None:
    """Pass ``--rpc`` before ``--device``, which may name the workers' devices."""
    if workers.used:
        offers = (
            f"{answer.address} offers {memory_text(sum(device.free_bytes for device in answer.devices))}"
            for answer in workers.used
        )
        endpoints = ",".join(answer.endpoint for answer in workers.used)
        line.give("--rpc", endpoints, f"layers on other machines: {', '.join(offers)}", asked="rpc")
    for answer in workers.missing:
        line.leave_out("--rpc", f"planned without the worker {answer.address}: {answer.problem}")
    if workers.excluded:
        line.leave_out("--rpc", f"planned without workers: {workers.excluded}")


def warnings_of(workers: Workers) -> tuple[tuple[str, str], ...]:
    """Return (message, remedy) for each worker that the plan has to do without."""
    return tuple(
        (
            f"Started without the RPC worker {answer.address}: {answer.problem}.",
            f"{_REMEDIES[answer.state]} The next restart of the model uses it.",
        )
        for answer in workers.missing
    )


_REMEDIES = {
    "busy": "Stop the other llama-server that uses it, or restart the worker if it hangs.",
    "absent": "Start it (llamasup rpc-worker), and check the network between the machines.",
}


def missing_error(model: str, workers: Workers, *, fits: bool = False) -> WorkerMissing:
    """Return the error for missing workers, which the model needs to fit, or (``fits``) otherwise."""
    names = ", ".join(f"{answer.address} ({answer.problem})" for answer in workers.missing)
    several = "s" if len(workers.missing) > 1 else ""
    if fits:
        message = f"{model} needs the RPC worker{several} {names}: its devices name workers by their number."
    else:
        message = f"{model} does not fit in memory without the RPC worker{several} {names}."
    remedies = dict.fromkeys(_REMEDIES[answer.state] for answer in workers.missing)
    return WorkerMissing(message, remedy=" ".join(remedies))


_MAY_BE_LOST = frozenset({WORKER_LOST, "hung_start", "warm_up_failed", "unresponsive", "wedged", "unknown"})


def may_be_lost_worker(diagnosis: Diagnosis) -> bool:
    """Return whether a lost worker can be the reason: its llama-server hangs, or exits without another."""
    return diagnosis.cause in _MAY_BE_LOST or (diagnosis.cause == "aborted" and not diagnosis.lines)


def name_lost(diagnosis: Diagnosis, answers: Sequence[WorkerAnswer]) -> Diagnosis:
    """Add the workers that do not answer to the ``diagnosis`` of a llama-server that may have lost one.

    llama-server does not say which worker it lost, and seems to hang if a worker hangs.
    """
    lost = [answer for answer in answers if answer.state != "ready"]
    if lost:
        several = "s" if len(lost) > 1 else ""
        names = " and ".join(f"{answer.address} ({answer.problem})" for answer in lost)
        message = f"llama-server lost the RPC worker{several} {names}."
    elif diagnosis.cause == WORKER_LOST:
        names = " or ".join(answer.address for answer in answers)
        message = f"llama-server lost its connection to the RPC worker {names}, which answers again."
    else:
        return diagnosis
    return replace(
        diagnosis,
        cause=WORKER_LOST,
        message=message,
        remedy="See the worker's log on its machine, and the network between the machines.",
        deterministic=False,
        exit_code=75,
    )
