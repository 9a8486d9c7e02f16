"""Explains the state of a model in sentences, with the last decisions about it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from llamasup.core.pool.model_info import ModelInfo
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.pool.why.recording import (
    Decision,
    Kind,
    reductions_change,
    reductions_text,
    waiting_change,
    waiting_text,
)

_ENDED: Final[frozenset[Kind]] = frozenset({"evict", "unload", "refuse", "fail"})
_BEGUN: Final[frozenset[Kind]] = frozenset({"load", "restart", "update"})

_THEN: Final[dict[Kind, str]] = {
    "load": "was loaded",
    "evict": "was evicted",
    "unload": "was unloaded",
    "restart": "was restarted",
    "refuse": "was refused",
    "fail": "was given up",
    "update": "was updated",
}


class Explanation(Struct, frozen=True):
    """The reasons for a state. ``change``: what would have to change; empty if nothing has to."""

    sentences: tuple[str, ...]
    change: tuple[str, ...] = ()


def explain(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    """Explain the state of a model. ``decisions``: about this model, the newest first."""
    found = _state(info, decisions, now)
    queue = _queue(info)
    return Explanation(
        (*found.sentences, *queue.sentences), tuple(dict.fromkeys((*found.change, *queue.change)))
    )


def _state(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    match info.state:
        case ShownState.READY:
            return _ready(info, decisions, now)
        case ShownState.WAITING:
            return _waiting(info)
        case ShownState.DOWNLOADING:
            return Explanation(
                (f"{info.id} was asked for, and its file is missing.", *_sentence(info.download))
            )
        case ShownState.DRAINING | ShownState.STOPPING:
            return _ending(info, decisions, now)
        case ShownState.BACKOFF:
            return _backoff(info, decisions, now)
        case ShownState.FAILED | ShownState.BROKEN:
            return _failed(info, decisions, now)
        case ShownState.STARTING | ShownState.LOADING | ShownState.WARMING:
            return _starting(info, decisions, now)
        case _:
            return _absent(info, decisions, now)


# --- by state


def _ready(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    since = _since_load(decisions)
    sentences = [_past(each, now) for each in reversed(since)] or [f"{info.id} is loaded."]
    sentences += [f"It has {text}." for text in reductions_text(info.reduced)]
    if info.spec.stay.pin:
        sentences.append("It is pinned: it is not evicted for another model.")
    elif info.unload_in_s is not None:
        sentences.append(f"It is unloaded in {_span(info.unload_in_s)} if no request uses it (ttl).")
    crashed = next((each.change for each in since if each.kind == "restart"), ())
    return Explanation(tuple(sentences), (*crashed, *reductions_change(info.reduced)))


def _waiting(info: ModelInfo) -> Explanation:
    if info.waits is None:
        return Explanation(
            (f"{info.id} was asked for. llamasup first reads its file, or loads other models.",)
        )
    sentences = [f"{info.id} was asked for, and waits because {waiting_text(info.waits)}."]
    if info.waits.chosen and info.overdue_in_s is not None:
        left = _span(info.overdue_in_s)
        sentences.append(f"Models in use stay loaded for {left} more. Then they finish their requests first.")
    return Explanation(tuple(sentences), waiting_change(info.waits))


def _starting(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    sentences = [_past(each, now) for each in reversed(_since_load(decisions))]
    return Explanation((*sentences, f"{info.id} does not serve yet: its {info.program} starts."))


def _ending(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    in_flight = f" It finishes {_count(info.in_flight, 'request')} first." if info.in_flight else ""
    last = decisions[0] if decisions else None
    if last is not None and last.kind == "drain":
        return Explanation((f"{info.id} gets no new requests{last.why}.{in_flight}",), last.change)
    if last is not None and last.kind in _THEN:
        return Explanation((_past(last, now), f"Its {info.program} is ending.{in_flight}"), last.change)
    return Explanation((f"The {info.program} of {info.id} is ending.{in_flight}",))


def _backoff(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    sentences = []
    last = _last(decisions, {"restart"})
    if last is not None:
        sentences.append(f"The {info.program} of {info.id} ended {_ago(last, now)}{last.why}.")
    due = "soon" if info.restart_in_s is None else f"in {_span(info.restart_in_s)}"
    sentences.append(f"{info.id} starts again {due}. The delay grows with each crash.")
    now_too = f"`llamasup restart {info.id}` starts it now."
    return Explanation(tuple(sentences), (*(() if last is None else last.change), now_too))


def _failed(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    last = _last(decisions, {"refuse", "fail"})
    if info.problem or last is None:
        problem = info.problem.strip().removesuffix(".")
        sentences = [f"{info.id} cannot be loaded: {problem}." if problem else f"{info.id} cannot be loaded."]
    else:
        sentences = [_past(last, now)]
    change = list(_sentence(info.remedy) or (() if last is None else last.change))
    if info.state is ShownState.FAILED:
        if info.retry_in_s is not None:
            sentences.append(f"A request tries it again in {_span(info.retry_in_s)}.")
        change.append(f"`llamasup load {info.id}` tries it now.")
    return Explanation(tuple(sentences), tuple(change))


def _absent(info: ModelInfo, decisions: Sequence[Decision], now: datetime) -> Explanation:
    last = _last(decisions, _ENDED)
    load = f"`llamasup load {info.id}` loads it."
    if not info.spec.stay.by_command:
        load = f"A request for it, or `llamasup load {info.id}`, loads it."
    if last is None:
        return Explanation((f"{info.id} is not loaded: nothing has asked for it.",), (load,))
    return Explanation((f"{info.id} is not loaded.", _past(last, now)), (load, *last.change))


def _queue(info: ModelInfo) -> Explanation:
    if not info.queued:
        return Explanation(())
    requests = _count(info.queued, "request")
    waits = "waits" if info.queued == 1 else "wait"
    if info.state is not ShownState.READY:
        return Explanation((f"{requests} {waits} for it.",))
    limit = info.max_concurrent
    if limit is not None and (info.slots is None or limit < info.slots):
        return Explanation(
            (f"{requests} {waits} because max_concurrent is {limit}.",),
            ("More requests run at a time with a larger max_concurrent.",),
        )
    if info.slots == 1:
        slots = "its only slot is busy"
    else:
        slots = f"all {'' if info.slots is None else f'{info.slots} '}slots are busy"
    return Explanation(
        (f"{requests} {waits} because {slots}.",),
        ("More requests run at a time with more slots (parallel), or with more processes (replicas).",),
    )


# --- decisions


def _since_load(decisions: Sequence[Decision]) -> Sequence[Decision]:
    """The last load, and the last restart or update after it, the newest first."""
    found: dict[Kind, Decision] = {}
    for decision in decisions:
        if decision.kind in _ENDED:
            break
        if decision.kind in _BEGUN:
            found.setdefault(decision.kind, decision)
        if decision.kind == "load":
            break
    return tuple(found.values())


def _last(decisions: Sequence[Decision], kinds: frozenset[Kind] | set[Kind]) -> Decision | None:
    return next((decision for decision in decisions if decision.kind in kinds), None)


def _past(decision: Decision, now: datetime) -> str:
    return f"{decision.model} {_THEN[decision.kind]} {_ago(decision, now)}{decision.why}."


def _ago(decision: Decision, now: datetime) -> str:
    passed_s = (now - decision.time).total_seconds()
    return "just now" if passed_s < 1 else f"{_span(passed_s)} ago"


# --- words


def _span(seconds: float) -> str:
    """``3 minutes``: the largest whole unit."""
    left = max(0, round(seconds))
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if left >= size:
            return _count(left // size, unit)
    return _count(left, "second")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _sentence(text: str) -> tuple[str, ...]:
    return (text if text.endswith((".", "?", "!")) else f"{text}.",) if text else ()
