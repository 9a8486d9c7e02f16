"""Explains the state of a model in sentences, with the last decisions about it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from llamasup.core.llama_server.plan_limits import Reduction
from llamasup.core.pool.eviction_policy import Grounds
from llamasup.core.pool.why.decision import Decision, Kind
from llamasup.core.pool.why.recording import reductions_change, reductions_text, waiting_change, waiting_text

_ENDED: Final[frozenset[Kind]] = frozenset({"evict", "unload", "refuse", "fail"})
_BEGUN: Final[frozenset[Kind]] = frozenset({"load", "restart", "update"})
_STARTING: Final = frozenset({"starting", "loading", "warming"})

_THEN: Final[dict[Kind, str]] = {
    "load": "was loaded",
    "evict": "was evicted",
    "unload": "was unloaded",
    "restart": "was restarted",
    "refuse": "was refused",
    "fail": "was given up",
    "update": "was updated",
}


class ModelView(Struct, frozen=True):
    """A model now. ``state``: as in ``status``. Times in seconds from now; None: not due."""

    id: str
    state: str
    in_flight: int = 0
    queued: int = 0
    slots: int | None = None
    max_concurrent: int | None = None
    """The requests that run at a time, where the user limits them."""
    reduced: tuple[Reduction, ...] = ()
    waits: Grounds | None = None
    overdue_in_s: float | None = None
    """Until busy models are unloaded for it."""
    pinned: bool = False
    by_command: bool = False
    """Requests do not load it."""
    problem: str = ""
    """Why it cannot be loaded, with ``remedy``."""
    remedy: str = ""
    download: str = ""
    """The progress of its download."""
    retry_in_s: float | None = None
    restart_in_s: float | None = None
    unload_in_s: float | None = None


class Explanation(Struct, frozen=True):
    """The reasons for a state. ``change``: what would have to change; empty if nothing has to."""

    sentences: tuple[str, ...]
    change: tuple[str, ...] = ()


def explain(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    """Explain the state of a model. ``decisions``: about this model, the newest first."""
    found = _state(view, decisions, now)
    queue = _queue(view)
    return Explanation(
        (*found.sentences, *queue.sentences), tuple(dict.fromkeys((*found.change, *queue.change)))
    )


def _state(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    match view.state:
        case "ready":
            return _ready(view, decisions, now)
        case "waiting":
            return _waiting(view)
        case "downloading":
            return Explanation(
                (f"{view.id} was asked for, and its file is missing.", *_sentence(view.download))
            )
        case "draining" | "stopping":
            return _ending(view, decisions, now)
        case "backoff":
            return _backoff(view, decisions, now)
        case "failed" | "broken":
            return _failed(view, decisions, now)
        case state if state in _STARTING:
            return _starting(view, decisions, now)
        case _:
            return _absent(view, decisions, now)


# --- by state


def _ready(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    since = _since_load(decisions)
    sentences = [_past(each, now) for each in reversed(since)] or [f"{view.id} is loaded."]
    sentences += [f"It has {text}." for text in reductions_text(view.reduced)]
    if view.pinned:
        sentences.append("It is pinned: it is not evicted for another model.")
    elif view.unload_in_s is not None:
        sentences.append(f"It is unloaded in {_span(view.unload_in_s)} if no request uses it (ttl).")
    crashed = next((each.change for each in since if each.kind == "restart"), ())
    return Explanation(tuple(sentences), (*crashed, *reductions_change(view.reduced)))


def _waiting(view: ModelView) -> Explanation:
    if view.waits is None:
        return Explanation(
            (f"{view.id} was asked for. llamasup first reads its file, or loads other models.",)
        )
    sentences = [f"{view.id} was asked for, and waits because {waiting_text(view.waits)}."]
    if view.waits.chosen and view.overdue_in_s is not None:
        left = _span(view.overdue_in_s)
        sentences.append(f"Models in use stay loaded for {left} more. Then they finish their requests first.")
    return Explanation(tuple(sentences), waiting_change(view.waits))


def _starting(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    sentences = [_past(each, now) for each in reversed(_since_load(decisions))]
    return Explanation((*sentences, f"{view.id} does not serve yet: its llama-server starts."))


def _ending(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    in_flight = f" It finishes {_count(view.in_flight, 'request')} first." if view.in_flight else ""
    last = decisions[0] if decisions else None
    if last is not None and last.kind == "drain":
        return Explanation((f"{view.id} gets no new requests{last.why}.{in_flight}",), last.change)
    if last is not None and last.kind in _THEN:
        return Explanation((_past(last, now), f"Its llama-server is ending.{in_flight}"), last.change)
    return Explanation((f"The llama-server of {view.id} is ending.{in_flight}",))


def _backoff(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    sentences = []
    last = _last(decisions, {"restart"})
    if last is not None:
        sentences.append(f"The llama-server of {view.id} ended {_ago(last, now)}{last.why}.")
    due = "soon" if view.restart_in_s is None else f"in {_span(view.restart_in_s)}"
    sentences.append(f"{view.id} starts again {due}. The delay grows with each crash.")
    now_too = f"`llamasup restart {view.id}` starts it now."
    return Explanation(tuple(sentences), (*(() if last is None else last.change), now_too))


def _failed(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    last = _last(decisions, {"refuse", "fail"})
    if view.problem or last is None:
        problem = view.problem.strip().removesuffix(".")
        sentences = [f"{view.id} cannot be loaded: {problem}." if problem else f"{view.id} cannot be loaded."]
    else:
        sentences = [_past(last, now)]
    change = list(_sentence(view.remedy) or (() if last is None else last.change))
    if view.state == "failed":
        if view.retry_in_s is not None:
            sentences.append(f"A request tries it again in {_span(view.retry_in_s)}.")
        change.append(f"`llamasup load {view.id}` tries it now.")
    return Explanation(tuple(sentences), tuple(change))


def _absent(view: ModelView, decisions: Sequence[Decision], now: datetime) -> Explanation:
    last = _last(decisions, _ENDED)
    load = f"`llamasup load {view.id}` loads it."
    if not view.by_command:
        load = f"A request for it, or `llamasup load {view.id}`, loads it."
    if last is None:
        return Explanation((f"{view.id} is not loaded: nothing has asked for it.",), (load,))
    return Explanation((f"{view.id} is not loaded.", _past(last, now)), (load, *last.change))


def _queue(view: ModelView) -> Explanation:
    if not view.queued:
        return Explanation(())
    requests = _count(view.queued, "request")
    waits = "waits" if view.queued == 1 else "wait"
    if view.state != "ready":
        return Explanation((f"{requests} {waits} for it.",))
    limit = view.max_concurrent
    if limit is not None and (view.slots is None or limit < view.slots):
        return Explanation(
            (f"{requests} {waits} because max_concurrent is {limit}.",),
            ("More requests run at a time with a larger max_concurrent.",),
        )
    if view.slots == 1:
        slots = "its only slot is busy"
    else:
        slots = f"all {'' if view.slots is None else f'{view.slots} '}slots are busy"
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
