"""Plans the generations of one model: as large as fits, and smaller after a failed start.

Owns the current fallback step of this run, and the load history that the next run starts from.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, replace

from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.inspect import devices_now, library_folder
from llamasup.core.llama_server.log_lines import Drafted, read_sizes
from llamasup.core.llama_server.plan_limits import Adjustment, PlanLimits
from llamasup.core.llama_server.rpc.workers import (
    NO_WORKERS,
    may_be_lost_worker,
    missing_error,
    name_lost,
)
from llamasup.core.llama_server.slots.policy import SlotHome
from llamasup.core.planning.facts import Launch, ask_workers, attachments, find_workers, with_name
from llamasup.core.planning.ladder import (
    Admission,
    FailedStart,
    admit,
    is_out_of_memory,
    largest_that_fits,
    step_down,
    with_failed_starts,
    without_result,
)
from llamasup.core.planning.measured.load_history import (
    DraftCounts,
    add_counts,
    add_measurement,
    add_served,
    forget_crashes,
    limits_from,
    runtime_id,
)
from llamasup.core.planning.measured.load_times import (
    LoadFacts,
    LoadTimes,
    add_times,
    times_for,
    times_of_others,
)
from llamasup.core.planning.measured.stores import (
    add_times_of_runtime,
    load_history,
    load_results,
    save_history,
    save_results,
    times_of_runtime,
)
from llamasup.core.planning.measured.tuned import (
    Changes,
    Conditions,
    Kept,
    KeptResults,
    Measured,
    asked_key,
    defaults_key,
    files_key,
    machine_key,
    remove_result,
    result_for,
)
from llamasup.core.planning.memory.shares import MemoryBudget
from llamasup.core.planning.plan import LaunchPlan, PlanFacts, child_address_kind, needs_key_file, plan
from llamasup.core.planning.plan_report import plan_as_json, reductions, refusal
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.hardware.probe import hardware
from llamasup.core.system.native import native
from llamasup.core.system.process.platform import free_loopback_port
from llamasup.core.system.storage.fact_cache import FileIdentity
from llamasup.core.system.storage.folders import atomic_write
from llamasup.errors import (
    BrokenRuntime,
    DoesNotFit,
    FolderUnusable,
    LlamasupError,
    WorkerMissing,
)

_KEY_BYTES = 24


class _Endpoint(Struct, frozen=True):
    """The address of a child, and its key if others can reach that address."""

    address: Address
    key: str | None = None
    key_file: str | None = None


class Planner:
    """Makes the plans of one model, and records what they took.

    ``folder`` holds the private files of this run; the names of this model's files begin with ``prefix``.
    ``budget`` returns the memory that the model may take now, if it shares the machine with other models.
    ``trial``: changes to try in place of the kept ones; then nothing is recorded.
    """

    def __init__(
        self,
        launch: Launch,
        folder: Path,
        prefix: str = "",
        budget: Callable[[], MemoryBudget] | None = None,
        *,
        trial: Changes | None = None,
    ) -> None:
        self._launch = launch
        self._folder = folder
        self._prefix = prefix
        self._budget = budget
        self._trial = trial
        self._history = load_history(launch.model_path)
        self._model_file = FileIdentity.find(launch.model_path)
        self._results = KeptResults() if self._model_file is None else load_results(self._model_file)
        self._result: Kept | None = None  # of ``llamasup tune``, in the latest plan
        self._result_failed = False
        self._suspect: Kept | None = None  # its start failed, and none without it has served yet
        self._measured: Measured | None = None if trial is None else Measured(trial, "to be measured")
        self._runtime = runtime_id(launch.runtime.command, launch.runtime.capabilities)
        self._devices = launch.runtime.capabilities.devices
        self._workers = NO_WORKERS  # of the latest plan
        self._preferred_key = ""  # the key of the plan without limits
        self._failures: tuple[FailedStart, ...] = ()  # since the last plan that served; at most MAX_STEPS
        self._slot_home: SlotHome | None = None

    def rename(self, model: str) -> None:
        """Use this name in later plans."""
        self._launch = with_name(self._launch, model)

    # --- before a start ---------------------------------------------------------------------------

    def plan(self, generation: int) -> LaunchPlan:
        """Make the plan of one generation. Blocks for a millisecond, longer if devices have to be queried.

        Each generation has its own address, so that a child that has not exited yet cannot be mistaken for
        its successor. The facts of the machine are read again, because memory and limits change. The only
        file that is written is the key file, for a build that reads its key only from a file.

        Raises UsageInvalid, ModelInvalid, RuntimeMissing, DoesNotFit or WorkerMissing.
        """
        admission = self.admission(generation)
        if (refused := self.refused(admission)) is not None:
            raise refused
        return admission.plan

    def check(self) -> None:
        """Raise what ``plan`` raises, without writing files or reserving a port."""
        if (refused := self.refused(self.admission())) is not None:
            raise refused

    def admission(self, generation: int | None = None) -> Admission[LaunchPlan]:
        """Make the plan, and list the plans considered.

        Without a generation, the address is a placeholder.
        """
        endpoint = self._placeholder_endpoint() if generation is None else self._endpoint(generation)
        self._slot_home = self._find_slot_home(is_start=generation is not None)
        self._workers = find_workers(self._launch, is_start=generation is not None)
        if generation is not None and generation > 1:
            # For the first generation, the runtime has just listed its devices.
            with contextlib.suppress(BrokenRuntime):
                self._devices = devices_now(self._launch.runtime, self._launch.environ)
        facts = self._facts(endpoint)
        if self._trial is None:
            self._result = self._kept(facts.hardware)
            self._measured = None if self._result is None else self._result.measured
            if self._measured is not None and not self._is_usable(replace(facts, measured=self._measured)):
                self._measured = None
            facts = replace(facts, measured=self._measured)
        preferred = plan(facts)
        self._preferred_key = preferred.key
        if self._failures:
            start = self._failures[-1].adjustment.bounds
        else:
            available_bytes = preferred.memory.available_bytes
            start = limits_from(self._history, self._runtime, preferred.key, available_bytes, _today())
        if not self._checks_memory:
            made = plan(replace(facts, bounds=start))
            found = Admission(made, (made,))
        else:
            found = admit(lambda bounds: plan(replace(facts, bounds=bounds)), start)
        reduced = reductions(preferred, found.plan, self._launch.settings)
        return replace(found, plan=replace(found.plan, reduced=reduced)) if reduced else found

    def _kept(self, machine: Hardware) -> Kept | None:
        """The kept result of ``llamasup tune`` for this start; None after a start with it failed."""
        if not self._results.results or self._result_failed:
            return None
        return result_for(self._results, self._conditions(machine))

    def conditions(self) -> Conditions:
        """The present conditions of a result of ``llamasup tune``. Raises what ``plan`` raises."""
        self._workers = find_workers(self._launch, is_start=False)
        return self._conditions(self._machine())

    def _conditions(self, machine: Hardware) -> Conditions:
        launch = self._launch
        plain = plan(replace(self._facts(self._placeholder_endpoint()), hardware=machine, measured=None))
        return Conditions(
            self._runtime,
            machine_key(machine, self._devices, cpu=native.cpu_name()),
            asked_key(launch.settings, launch.environ),
            files_key(map(astuple, attachments(launch))),
            defaults_key(plain.argv, plain.env),
        )

    def _is_usable(self, facts: PlanFacts) -> bool:
        """Whether the plan with the result is valid and fits in memory; else the plan without it is used."""
        try:
            return plan(facts).memory.fits or not self._checks_memory
        except LlamasupError:  # a damaged file can name any flag
            return False

    def refused(self, admission: Admission[LaunchPlan]) -> DoesNotFit | WorkerMissing | None:
        """The error that ``plan`` raises, with the settings that do fit; None if the plan is accepted."""
        if admission.plan.memory.fits or not self._checks_memory:
            return None
        if self._workers.missing:
            return missing_error(self._launch.model_id, self._workers)
        facts = self._facts(self._placeholder_endpoint())
        fitting = largest_that_fits(
            admission.considered[-1],
            facts.settings,
            lambda settings, bounds: plan(replace(facts, settings=settings, bounds=bounds)),
        )
        extra = facts.settings.extra
        by_config = self._budget is not None
        return refusal(self._launch.model_id, admission.preferred, fitting, extra=extra, by_config=by_config)

    def as_json(self, admission: Admission[LaunchPlan]) -> Mapping[str, Any]:
        """The ``plan`` object of the contract (docs/design.md)."""
        launch = self._launch
        return plan_as_json(
            admission.plan,
            model=str(launch.model_path),
            path=launch.runtime.path,
            kind=launch.runtime.kind,
            version=launch.runtime.capabilities.version,
            profile=launch.settings.profile,
            alternatives=admission.considered,
            refused=self.refused(admission),
        )

    def load_facts(self, made: LaunchPlan) -> LoadFacts:
        """Collect the facts about the load of ``made`` that are known before it begins."""
        of_cpu, filled = (
            sum(part.host_bytes for part in made.memory.parts if part.kind == kind)
            for kind in ("weights", "kv")
        )
        earlier = times_for(self._history.times, self._runtime, made.key)
        copied = sum(part.device_bytes for part in made.memory.parts if part.kind == "weights")
        facts = LoadFacts(made.memory.weights_bytes, of_cpu, copied, filled, earlier)
        if earlier is not None:
            return facts
        records = times_of_runtime(Path(self._launch.runtime.path))
        earlier = times_of_others(records, self._runtime, facts)
        return replace(facts, earlier=earlier, of_this_file=False)

    # --- after a start ----------------------------------------------------------------------------

    def step_down(self, made: LaunchPlan, diagnosis: Diagnosis) -> Adjustment | None:
        """The adjustment of the next plan after a start of ``made`` failed; None for no adjustment.

        The next plan is made without the result of ``llamasup tune``, and is smaller if memory was lacking.
        A second call for the same start returns the same adjustment, because a failure can show both in the
        log and in the exit.
        """
        last = self._failures[-1] if self._failures else None
        if last is not None and last.plan is made:
            return last.adjustment
        lacks_memory = is_out_of_memory(diagnosis)
        if made.measured is not None:
            self._result_failed = True
            self._suspect = None if lacks_memory else self._result
        self._measured = None
        facts = self._facts(self._placeholder_endpoint())

        def candidate(bounds: PlanLimits) -> LaunchPlan:
            return plan(replace(facts, bounds=bounds))

        taken = 0 if last is None else last.adjustment.step
        if made.measured is not None and not lacks_memory:
            plain = candidate(made.bounds)
            adjustment: Adjustment | None = without_result(made, plain, steps_taken=taken)
        else:
            adjustment = step_down(made, diagnosis, candidate, steps_taken=taken)
        if adjustment is not None:
            # If another program has taken memory since the plan was made, the plan is tried again earlier.
            available_bytes = min(made.memory.available_bytes, candidate(PlanLimits()).memory.available_bytes)
            self._failures = (*self._failures, FailedStart(made, diagnosis, adjustment, available_bytes))
        return adjustment

    def name_lost(self, made: LaunchPlan, diagnosis: Diagnosis) -> Diagnosis:
        """Add the RPC workers that do not answer to the ``diagnosis`` of an unexpected end. Blocks."""
        if not may_be_lost_worker(diagnosis):
            return diagnosis
        try:
            answers = ask_workers(self._launch, made.workers, is_start=True, again=True)
        except (LlamasupError, OSError):  # llama-server was removed: the diagnosis without their answers
            return diagnosis
        return name_lost(diagnosis, answers)

    def served(
        self,
        made: LaunchPlan,
        log: Sequence[str],
        *,
        resident_bytes: int | None,
        generated: bool,
        times: LoadTimes | None = None,
    ) -> None:
        """Record the memory and the time that ``made`` takes, and the plans that failed before it. Blocks on
        the disk.

        ``resident_bytes``: None if the process ended before the measurement. ``generated``: the server has
        generated a token.
        """
        if self._trial is not None:
            return
        if self._suspect is not None and made.measured is None:
            self._drop_result(self._suspect)
        sizes = read_sizes(log)
        if times is not None:
            times = replace(times, runtime=self._runtime, key=made.key)
            self._history = replace(self._history, times=add_times(self._history.times, times))
            add_times_of_runtime(Path(self._launch.runtime.path), times)
        if self._launch.settings.profile == "plain":
            save_history(self._launch.model_path, self._history)
            return  # llama-server got none of the planned sizes
        if sizes.complete and resident_bytes is not None:
            self._history = add_measurement(
                self._history,
                runtime=self._runtime,
                key=made.key,
                estimated=made.memory,
                used=made.correction,
                weights_bytes=sizes.weights_bytes,
                kv_bytes=sizes.kv_bytes,
                compute_bytes=sizes.compute_bytes,
                resident_bytes=resident_bytes,
                device_bytes=sizes.device_bytes,
            )
        if generated:
            self._history = add_served(self._history, self._runtime, made.key, _today())
        self._history = forget_crashes(self._history, self._runtime, made.key)
        self._history = with_failed_starts(
            self._history, self._failures, self._runtime, self._preferred_key, _today()
        )
        # The failures are recorded now, and later starts have their own MAX_STEPS.
        self._failures = ()
        save_history(self._launch.model_path, self._history)

    def drafted(self, made: LaunchPlan, drafted: Drafted) -> None:
        """Record how many drafted tokens were accepted. Blocks on the disk."""
        if self._trial is not None or made.draft is None:
            return
        counts = DraftCounts(self._runtime, made.draft, drafted.proposed, drafted.accepted)
        self._history = replace(self._history, drafts=add_counts(self._history.drafts, counts))
        save_history(self._launch.model_path, self._history)

    def _drop_result(self, result: Kept) -> None:
        """Delete a result: the start with it failed, and the start without it did not."""
        self._suspect = None
        assert self._model_file is not None
        with contextlib.suppress(FolderUnusable):  # then this process only does not use it
            save_results(self._model_file, remove_result(load_results(self._model_file), result))

    # --- one plan ---------------------------------------------------------------------------------

    @property
    def _checks_memory(self) -> bool:
        settings = self._launch.settings
        return settings.check_memory and settings.profile != "plain"

    def _machine(self) -> Hardware:
        """The machine as it is now, with the memory that this model may use."""
        machine = hardware()
        return machine if self._budget is None else self._budget().of_host(machine)

    def _facts(self, endpoint: _Endpoint) -> PlanFacts:
        """Collect the facts of a plan as they are now."""
        launch, runtime = self._launch, self._launch.runtime
        devices = self._devices if self._budget is None else self._budget().of_devices(self._devices)
        devices = (*devices, *self._workers.devices)
        return PlanFacts(
            command=runtime.command,
            kind=runtime.kind,
            capabilities=replace(runtime.capabilities, devices=devices),
            model=launch.model,
            model_path=str(launch.model_path),
            hardware=self._machine(),
            settings=launch.settings,
            address=endpoint.address,
            environ=launch.environ,
            config_home=str(self._folder),
            library_path=library_folder(runtime.kind, runtime.path),
            draft=launch.draft,
            mmproj=launch.mmproj,
            found=launch.found,
            api_key=endpoint.key,
            api_key_file=endpoint.key_file,
            history=self._history,
            shared=self._budget is not None,
            slot_home=self._slot_home,
            measured=self._measured,
            workers=self._workers,
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the latest plan, including the RPC workers' devices."""
        return (*self._devices, *self._workers.devices)

    @property
    def missing_workers(self) -> tuple[str, ...]:
        """The RPC workers that the latest plan lacks."""
        return tuple(answer.address for answer in self._workers.missing)

    def _find_slot_home(self, *, is_start: bool) -> SlotHome | None:
        launch, settings = self._launch, self._launch.settings
        if not settings.keep_slots:
            return None
        from llamasup.core.llama_server.slots.store import slot_home

        found = launch.found.projector if launch.found is not None else None
        projector = settings.mmproj if found is None else found.path
        return slot_home(launch.model_path, (projector or "", *settings.extra), make=is_start)

    def _endpoint(self, generation: int) -> _Endpoint:
        if self._on_socket:
            return _Endpoint(UnixAddress(str(self._folder / f"{self._prefix}{generation}.sock")))
        key = secrets.token_urlsafe(_KEY_BYTES)
        key_file = None
        if needs_key_file(self._launch.runtime.capabilities):
            path = self._folder / f"{self._prefix}{generation}.key"
            atomic_write(path, key.encode())
            key_file = str(path)
        return _Endpoint(TcpAddress("127.0.0.1", free_loopback_port()), key, key_file)

    def _placeholder_endpoint(self) -> _Endpoint:
        if self._on_socket:
            return _Endpoint(UnixAddress(str(self._folder / "0.sock")))
        return _Endpoint(TcpAddress("127.0.0.1", 0), "key", str(self._folder / "0.key"))

    @property
    def _on_socket(self) -> bool:
        return child_address_kind(self._launch.runtime.capabilities, platform=sys.platform) == "unix"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
