"""The history of earlier loads of a model: measured memory and times, and the plans that served and failed.

If llama-server or the kernel reported a lack of memory, later starts avoid the plan until more memory is
free. A crash is weaker evidence: it counts against the KV cache and flash attention only if it happened while
they were in use, happened twice in a row, and the same plan has not served within ``MAX_DAYS``. All these
records expire after ``MAX_DAYS``, and when the build of llama-server changes.

The history includes how many of the tokens that drafts proposed were accepted, because llama-server logs
these counts for each request. :mod:`llamasup.core.planning.measured.stores` keeps one history per model file
in the state folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import MIN_CTX_SIZE, PlanLimits
from llamasup.core.planning.measured.load_times import LoadTimes, is_possible
from llamasup.core.planning.memory.estimate import ESTIMATED, Correction, MemoryEstimate

# Users alternate between a few profiles and contexts of one model.
_MAX_RECORDS = 16
# Estimates are never so wrong: such a factor comes from a damaged file or a misread log.
_MAX_FACTOR = 100.0
# A plan that ran out of memory is tried again once this many times the free memory of then is free.
_RETRY_FACTOR = 1.5
# Drivers, kernels and other programs change within this time. Trying the full plan again costs one start.
MAX_DAYS = 14
# A single crash can have other causes: a memory error, a disk, a debugger.
_MIN_CRASHES = 2


class Measurement(Struct, frozen=True):
    """One measured load. ``kv`` and ``compute`` are measured over estimated, before any correction."""

    runtime: str
    key: str  # of the plan: everything that decides its sizes
    kv: float
    compute: float
    runtime_bytes: int
    resident_bytes: int
    device_bytes: int


class FailedPlan(Struct, frozen=True):
    """A plan that failed on this machine, and the bounds of the one that served.

    ``seen``: how many times in a row. ``failed``: the key of the plan that failed. An entry without these two
    fields (older versions) counts as seen once.
    """

    runtime: str
    asked: str  # the key of the plan without bounds: the record applies only to the same request
    bounds: PlanLimits
    cause: str
    out_of_memory: bool
    date: str  # ISO date of the last occurrence
    available_bytes: int
    seen: int = 1
    failed: str = ""


class Served(Struct, frozen=True):
    """A plan that has generated a token on this machine.

    ``date``: ISO date of the last token. An entry without it (older versions) counts as expired, because the
    driver or the kernel may have changed since.
    """

    runtime: str
    key: str
    date: str = ""


class LoadHistory(
    msgspec.Struct, frozen=True, rename={"measurements": "lessons", "failed_plans": "setbacks"}
):
    """The records of one model file, the newest last. The file on disk uses the names of older versions."""

    measurements: tuple[Measurement, ...] = ()
    failed_plans: tuple[FailedPlan, ...] = ()
    served: tuple[Served, ...] = ()
    times: tuple[LoadTimes, ...] = ()
    drafts: tuple[DraftCounts, ...] = ()


def validate(history: LoadHistory) -> LoadHistory:
    """The history without impossible records: a file on disk can contain anything."""
    return LoadHistory(
        tuple(measurement for measurement in history.measurements if _is_possible(measurement)),
        tuple(failed for failed in history.failed_plans if _can_be_planned(failed.bounds)),
        history.served,
        tuple(times for times in history.times if is_possible(times)),
        tuple(counts for counts in history.drafts if 0 <= counts.accepted <= counts.proposed > 0),
    )


def _is_possible(measurement: Measurement) -> bool:
    factors = all(0 <= factor <= _MAX_FACTOR for factor in (measurement.kv, measurement.compute))
    return factors and 0 <= measurement.runtime_bytes <= measurement.resident_bytes + measurement.device_bytes


def _can_be_planned(bounds: PlanLimits) -> bool:
    parallel, ctx_size, layers = bounds.parallel, bounds.ctx_size, bounds.gpu_layers
    if (parallel is not None and parallel < 1) or (layers is not None and layers < 0):
        return False
    return (ctx_size is None or ctx_size >= MIN_CTX_SIZE) and bounds.kv_type in (None, "f16", "q8_0")


def runtime_id(command: Sequence[str], capabilities: Capabilities) -> str:
    """The build that a record belongs to."""
    return " ".join(filter(None, (*command, capabilities.version, capabilities.build)))


def correction_for(history: LoadHistory, runtime: str, key: str) -> Correction:
    """Return the correction of the estimate of the plan ``key``.

    A measurement of the same plan replaces the estimate. A measurement of another plan of this model only
    raises estimates that were too low, because the ratio differs from shape to shape.
    """
    of_runtime = [measurement for measurement in history.measurements if measurement.runtime == runtime]
    same = [measurement for measurement in of_runtime if measurement.key == key]
    if same:
        last = same[-1]
        return Correction(last.kv, last.compute, last.runtime_bytes, measured=True)
    if of_runtime:
        last = of_runtime[-1]
        return Correction(max(1.0, last.kv), max(1.0, last.compute), last.runtime_bytes)
    return ESTIMATED


def add_measurement(
    history: LoadHistory,
    *,
    runtime: str,
    key: str,
    estimated: MemoryEstimate,
    used: Correction,
    weights_bytes: int,
    kv_bytes: int,
    compute_bytes: int,
    resident_bytes: int,
    device_bytes: int = 0,
) -> LoadHistory:
    """Add the sizes of one load, from llama-server's log and of its process.

    ``used`` is the correction that ``estimated`` was made with. The process's own memory is what remains
    after the logged sizes. The difference is negative if a part was not resident, or is on a device that
    llamasup does not query. A log without the size of a necessary KV cache is unreadable and is ignored.
    """
    if estimated.kv_bytes and not kv_bytes:
        return history
    own = resident_bytes + device_bytes - kv_bytes - compute_bytes - weights_bytes
    others = [record for record in history.measurements if (record.runtime, record.key) != (runtime, key)]
    measurement = Measurement(
        runtime,
        key,
        kv=_ratio(kv_bytes, estimated.kv_bytes, used.kv),
        compute=_ratio(compute_bytes, estimated.compute_bytes, used.compute),
        runtime_bytes=max(0, own),
        resident_bytes=resident_bytes,
        device_bytes=device_bytes,
    )
    return msgspec.structs.replace(history, measurements=(*others, measurement)[-_MAX_RECORDS:])


def add_served(history: LoadHistory, runtime: str, key: str, today: str) -> LoadHistory:
    """Record that the plan ``key`` has generated a token, so that its crashes do not count against the KV
    cache. ``today`` is an ISO date.
    """
    others = [record for record in history.served if (record.runtime, record.key) != (runtime, key)]
    return msgspec.structs.replace(history, served=(*others, Served(runtime, key, today))[-_MAX_RECORDS:])


def has_served(history: LoadHistory, runtime: str, key: str, today: str) -> bool:
    """Whether the plan ``key`` has generated a token within ``MAX_DAYS``."""
    records = (record for record in history.served if (record.runtime, record.key) == (runtime, key))
    return any(_is_recent(record.date, today) for record in records)


def forget_crashes(history: LoadHistory, runtime: str, key: str) -> LoadHistory:
    """Remove the crashes of the plan ``key``, which has just started without a crash between them."""
    remaining = (
        record
        for record in history.failed_plans
        if record.out_of_memory or record.runtime != runtime or key not in (record.asked, record.failed)
    )
    return msgspec.structs.replace(history, failed_plans=tuple(remaining))


def add_failed_plan(history: LoadHistory, failed: FailedPlan) -> LoadHistory:
    """Add ``failed``, and increase its count if it was seen before."""
    same = (failed.runtime, failed.asked, failed.out_of_memory)
    others, seen = [], 0
    for record in history.failed_plans:
        if (record.runtime, record.asked, record.out_of_memory) != same:
            others.append(record)
        elif record.bounds == failed.bounds and _is_recent(record.date, failed.date):
            seen = record.seen
    counted = replace(failed, seen=seen + 1)
    return msgspec.structs.replace(history, failed_plans=(*others, counted)[-_MAX_RECORDS:])


def limits_from(
    history: LoadHistory, runtime: str, asked: str, available_bytes: int, today: str
) -> PlanLimits:
    """The bounds of the plan that served last time, for as long as its failed predecessors count.

    ``today`` is an ISO date.
    """
    bounds, reasons = PlanLimits(), []
    for failed in history.failed_plans:
        is_same = failed.asked == asked or failed.bounds.without_own_flags
        if failed.runtime != runtime or not is_same or not _is_recent(failed.date, today):
            continue
        if failed.out_of_memory:
            if available_bytes >= _RETRY_FACTOR * failed.available_bytes:
                continue
            happened = "a larger plan ran out of memory"
        else:
            crashed = failed.failed or asked
            # A flag that the build does not accept for this model fails each time.
            is_sure = failed.seen >= _MIN_CRASHES or failed.bounds.without_own_flags
            if not is_sure or has_served(history, runtime, crashed, today):
                continue
            what = "with more flags" if failed.bounds.without_own_flags else "without this setting"
            happened = f"a plan {what} ended with {failed.cause}"
        reasons.append(f"{happened} on {failed.date}")
        bounds = _both(bounds, failed.bounds)
    return replace(bounds, why=" and ".join(reasons))


def _both(one: PlanLimits, other: PlanLimits) -> PlanLimits:
    types = (one.kv_type, other.kv_type)
    return PlanLimits(
        parallel=_least(one.parallel, other.parallel),
        ctx_size=_least(one.ctx_size, other.ctx_size),
        kv_type="f16" if "f16" in types else one.kv_type or other.kv_type,
        flash_attn_off=one.flash_attn_off or other.flash_attn_off,
        gpu_layers=_least(one.gpu_layers, other.gpu_layers),
        drafts_off=one.drafts_off or other.drafts_off,
        bare=one.bare or other.bare,
    )


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _is_recent(day: str, today: str) -> bool:
    try:
        days = (date.fromisoformat(today) - date.fromisoformat(day)).days
    except ValueError:  # a damaged file, or an entry of an older version
        return False
    return abs(days) <= MAX_DAYS  # a clock may have been set back


def _ratio(measured: int, estimated: int, used: float) -> float:
    return measured * used / estimated if estimated else used


# --- drafts --------------------------------------------------------------------------------------

_MAX_DRAFTS = 8
# Older requests count less and less, so that a draft that was trained again is judged by its own tokens.
_MAX_PROPOSED = 20_000
_MIN_PROPOSED = 1000
# The wide model of scripts/bench/drafts.py with --spec-synth-rates (b11434): a share of 0.3 gave 0.8 times
# the speed with drafts of 4 tokens and 1.1 times with 8; a share of 0.5 gave 0.9 and 1.2.
_LOW = 0.35


class DraftCounts(Struct, frozen=True):
    """The counts of one ``draft``: a path, or the type of drafting of a model that drafts for itself."""

    runtime: str
    draft: str
    proposed: int
    accepted: int


def add_counts(records: Sequence[DraftCounts], new: DraftCounts) -> tuple[DraftCounts, ...]:
    """Add the counts of one process, the newest last."""
    earlier = counts_for(records, new.runtime, new.draft)
    if earlier is not None:
        kept = max(0.0, min(1.0, (_MAX_PROPOSED - new.proposed) / max(1, earlier.proposed)))
        proposed = new.proposed + round(earlier.proposed * kept)
        new = replace(new, proposed=proposed, accepted=new.accepted + round(earlier.accepted * kept))
    others = [record for record in records if record is not earlier]
    return (*others, new)[-_MAX_DRAFTS:]


def counts_for(records: Sequence[DraftCounts], runtime: str, draft: str) -> DraftCounts | None:
    """Find the counts of this draft. None: it has none."""
    return next((one for one in records if (one.runtime, one.draft) == (runtime, draft)), None)


def is_low(proposed: int, accepted: int) -> bool:
    """Whether so few tokens were accepted that answers are hardly faster than without drafts, or slower."""
    return proposed >= _MIN_PROPOSED and accepted < _LOW * proposed


def acceptance(proposed: int, accepted: int) -> str:
    """Describe the counts for users."""
    share = f"{accepted / proposed:.0%} of {proposed:,} tokens that the draft proposed were accepted"
    if not is_low(proposed, accepted):
        return share
    return f"only {share}, so drafts hardly pay: llamasup tune measures it"
