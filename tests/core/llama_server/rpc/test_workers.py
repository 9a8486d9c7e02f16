"""Which RPC workers a start uses, and how a lost one is named."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.argv_builder import read_extra
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.rpc.workers import (
    WorkerAnswer,
    Workers,
    choose_workers,
    may_be_lost_worker,
    missing_error,
    name_lost,
    need_every_worker,
    warnings_of,
    why_excluded,
)
from llamasup.core.planning.memory.shares import needs_of
from llamasup.core.system.hardware.devices import Device
from tests.core.planning.plans import GIB, NEW, capabilities, planned, reason, value

GPU = Device("RPC0", "10.0.0.2:50052", 24 * GIB, 20 * GIB, remote=True)


def answer(
    host: str, state: Literal["ready", "busy", "absent"] = "ready", *, devices: int = 1
) -> WorkerAnswer:
    address = f"{host}:50052"
    problem = "" if state == "ready" else "it accepts no connection"
    return WorkerAnswer(address, address, state, (replace(GPU, description=address),) * devices, problem)


FIRST, SECOND = answer("10.0.0.2"), answer("10.0.0.3")
GONE = answer("10.0.0.4", "absent", devices=0)
HANG = Diagnosis("wedged", "llama-server hangs.", "", (), False, 75)
LOST = replace(HANG, cause="rpc_worker_lost", message="llama-server lost one of its RPC workers.")


def test_devices_are_numbered_in_the_order_of_the_flag() -> None:
    workers = choose_workers((FIRST, GONE, answer("10.0.0.5", devices=2)), is_start=True)
    assert [device.name for device in workers.devices] == ["RPC0", "RPC1", "RPC2"]
    assert workers.addresses == ("10.0.0.2:50052", "10.0.0.5:50052")


def test_busy_worker_counts_with_its_last_answer_only_in_an_estimate() -> None:
    busy = answer("10.0.0.2", "busy")
    assert choose_workers((busy,), is_start=True).missing == (busy,)
    assert choose_workers((busy,), is_start=False).used == (busy,)
    unknown = answer("10.0.0.2", "busy", devices=0)
    assert choose_workers((unknown,), is_start=False).missing == (unknown,)


def test_plan_names_the_workers_and_their_memory() -> None:
    workers = Workers((FIRST, SECOND))
    made = planned(capabilities(NEW, *workers.devices), workers=workers)
    assert value(made, "--rpc") == "10.0.0.2:50052,10.0.0.3:50052"
    assert "10.0.0.2:50052 offers 20 GiB" in reason(made, "--rpc")
    assert made.device == "RPC0,RPC1"
    assert made.workers == ("10.0.0.2:50052", "10.0.0.3:50052")
    assert made.warnings == ()


def test_plan_without_a_missing_worker_says_why() -> None:
    workers = Workers((FIRST,), (GONE,))
    made = planned(capabilities(NEW, *workers.devices), workers=workers)
    left_out = [each for each in made.reasons if not each.passed and each.flag == "--rpc"]
    assert "without the worker 10.0.0.4:50052: it accepts no connection" in left_out[0].reason
    assert made.warnings == warnings_of(workers)
    assert "Started without the RPC worker 10.0.0.4:50052" in made.warnings[0][0]


@pytest.mark.parametrize(
    ("extra", "gpu_layers", "why"),
    [
        ((), None, ""),
        ((), "all", ""),
        ((), 0, "with 0 GPU layers, no layer is on a device"),
        (("--gpu-layers", "0"), 8, "with 0 GPU layers, no layer is on a device"),
        (("--gpu-layers", "8"), 0, ""),
        (("--device", "CUDA0"), None, "--device CUDA0 excludes them"),
        (("--device", "none"), None, "--device none excludes them"),
        (("--device", "CUDA0,RPC1"), None, ""),
    ],
)
def test_settings_can_exclude_all_workers(
    extra: tuple[str, ...], gpu_layers: int | str | None, why: str
) -> None:
    extra_args = read_extra(capabilities(NEW), extra)
    assert why_excluded(extra_args, gpu_layers) == why
    assert need_every_worker(extra_args) is ("RPC" in "".join(extra))


def test_plan_without_workers_says_which_setting_excludes_them() -> None:
    made = planned(workers=Workers(excluded="--device CUDA0 excludes them"))
    assert "--rpc" not in made.argv
    assert "planned without workers: --device CUDA0 excludes them" in reason(made, "--rpc")
    assert made.warnings == ()


def test_remedy_for_a_busy_worker_is_not_to_start_it() -> None:
    ((_, of_absent), (_, of_busy)) = warnings_of(Workers((), (GONE, answer("10.0.0.5", "busy"))))
    assert of_absent.startswith("Start it")
    assert of_busy.startswith("Stop the other llama-server")
    both = missing_error("large", Workers((), (GONE, answer("10.0.0.5", "busy"))))
    assert "Start it" in both.remedy
    assert "Stop the other" in both.remedy


def test_memory_of_workers_is_no_need_of_this_machine() -> None:
    local = Device("CUDA0", "a GPU", 24 * GIB, 22 * GIB)
    made = planned(capabilities(NEW, local, GPU), workers=Workers((FIRST,)))
    needs = needs_of(made.memory, (local, GPU))
    assert set(needs) == {"ram", "CUDA0"}
    assert needs["CUDA0"] * 2 >= made.memory.device_bytes
    alone = planned(capabilities(NEW, GPU), workers=Workers((FIRST,)))
    assert needs_of(alone.memory, (GPU,)) == {"ram": alone.memory.host_bytes}


def test_model_that_needs_a_missing_worker_has_an_error_that_may_pass() -> None:
    error = missing_error("large", Workers((), (GONE,)))
    assert error.exit_code == 75
    assert error.message == (
        "large does not fit in memory without the RPC worker 10.0.0.4:50052 (it accepts no connection)."
    )
    numbered = missing_error("large", Workers((), (GONE,)), fits=True)
    assert numbered.message.endswith("accepts no connection): its devices name workers by their number.")
    two = missing_error("large", Workers((), (GONE, answer("10.0.0.5", "absent"))))
    assert "the RPC workers 10.0.0.4:50052" in two.message


def test_hang_is_the_loss_of_the_worker_that_does_not_answer() -> None:
    named = name_lost(HANG, (FIRST, GONE))
    assert named.cause == "rpc_worker_lost"
    assert named.message == ("llama-server lost the RPC worker 10.0.0.4:50052 (it accepts no connection).")
    assert not named.deterministic
    assert name_lost(replace(HANG, exit_code=65), (GONE,)).exit_code == 75


def test_only_an_end_without_another_reason_may_be_a_lost_worker() -> None:
    assert may_be_lost_worker(HANG)
    assert may_be_lost_worker(replace(HANG, cause="aborted"))
    assert not may_be_lost_worker(replace(HANG, cause="aborted", lines=("terminate called",)))
    assert not may_be_lost_worker(replace(HANG, cause="out_of_memory_device"))


def test_two_lost_workers_are_both_named() -> None:
    assert "lost the RPC workers 10.0.0.4:50052 (" in name_lost(LOST, (GONE, answer("h", "busy"))).message


def test_hang_with_workers_that_answer_stays_a_hang() -> None:
    assert name_lost(HANG, (FIRST, SECOND)) == HANG


def test_lost_worker_that_answers_again_is_one_of_them() -> None:
    named = name_lost(LOST, (FIRST, SECOND))
    assert "10.0.0.2:50052 or 10.0.0.3:50052, which answers again" in named.message


def test_plan_without_any_worker_passes_no_flag() -> None:
    made = planned(workers=Workers((), (GONE,)))
    assert "--rpc" not in made.argv
    assert made.workers == ()
