"""The decisions of a pool about its models, in words, and the last of them (pure).

The policy, the plan and the diagnosis give the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.llama_server.plan_limits import Change, Reduction
from llamasup.core.pool.cheapest_set import Demand, Resource
from llamasup.core.pool.eviction_policy import Action, Cordon, Grounds, Load, Uncordon
from llamasup.core.supervision.events import LoadFailed, ModelUnloading, PublishedEvent, ServerExited
from llamasup.core.system.text import memory_text

MAX_DECISIONS: Final = 200
"""For a pool of a few models under load, some minutes to hours; about 100 KB."""

Kind = Literal[
    "load",
    "wait",
    "smaller",
    "evict",
    "unload",
    "drain",
    "resume",
    "restart",
    "refuse",
    "fail",
    "update",
    "upgrade",
    "keep",
    "return",
]

_NOW: Final[dict[Kind, str]] = {
    "load": "is loaded",
    "wait": "waits",
    "smaller": "is smaller than asked",
    "evict": "is evicted",
    "unload": "is unloaded",
    "drain": "gets no new requests",
    "resume": "gets requests again",
    "restart": "is restarted",
    "refuse": "is refused",
    "fail": "is not restarted",
    "update": "is updated",
    "upgrade": "gets a new build of llama.cpp",
    "keep": "keeps its build of llama.cpp",
    "return": "returns to its old build of llama.cpp",
}


class Decision(Struct, frozen=True):
    """A decision about a model.

    ``why``: the end of a sentence, such as `` because a request asked for it``. ``change``: what would
    have to change for another decision, in sentences.
    """

    time: datetime
    model: str
    kind: Kind
    why: str
    change: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.model} {_NOW[self.kind]}{self.why}."

    def as_json(self) -> dict[str, Any]:
        """Return the decision as docs/control.md describes it."""
        return {
            "time": self.time.isoformat(timespec="milliseconds"),
            "model": self.model,
            "kind": self.kind,
            "text": self.text,
        }


class Decisions:
    """The last decisions of a pool, which alone adds to them."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)

    def __repr__(self) -> str:
        return f"<{len(self._decisions)} Decisions>"

    def add(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def rename(self, model: str, new: str) -> None:
        """The decisions about ``model`` stay with it under its new name."""
        renamed = [replace(each, model=new) if each.model == model else each for each in self._decisions]
        self._decisions.clear()
        self._decisions.extend(renamed)

    def last(self, limit: int = MAX_DECISIONS) -> Sequence[Decision]:
        """The newest first."""
        return tuple(reversed(self._decisions))[:limit]

    def of(self, model: str) -> Sequence[Decision]:
        """The decisions about ``model``, the newest first."""
        return tuple(decision for decision in self.last() if decision.model == model)


BuildKind = Literal["upgrade", "keep", "return"]

LoadedBy = Literal["request", "command", "preload", "start", "update"]
"""The reason of a load."""

_LOADED_BY: Final[Mapping[LoadedBy, str]] = {
    "request": "a request asked for it",
    "command": "a command asked for it",
    "preload": "its settings say preload",
    "start": "llamasup was started for it",
    "update": "it was loaded before its file or its settings changed",
}

_MORE_MEMORY: Final = (
    "Allow more memory (memory in the config), or make the models smaller (ctx_size, parallel)."
)
_MORE_ROOM: Final[Mapping[str, str]] = {
    "memory": _MORE_MEMORY,
    "count": "Allow more loaded models (max_loaded in the config).",
    "group": "Take one of the models out of the group (groups in the config).",
}
_PIN: Final = "To keep it loaded, pin it (pin: true)."

_UNLOADED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "ttl": ("no request used it during its ttl", ("To keep it loaded longer, set a longer ttl, or pin it.",)),
    "asked": ("a command asked for it", ()),
    "removed": ("it is no longer served", ("Add it to the config, or to a folder of models_dir.",)),
}


def of_action(
    action: Action, time: datetime, by: LoadedBy, grounds: Mapping[str, Grounds]
) -> Decision | None:
    """Find the decision behind an action, unless an event will report it. ``by``: the reason of a load."""
    match action:
        case Load(model):
            return Decision(time, model, "load", f" because {_LOADED_BY[by]}")
        case Cordon(model, for_id):  # its requests in flight finish, then it is evicted
            why = _needed_by(for_id, grounds.get(for_id))
            return Decision(time, model, "drain", f" because {why}", (_PIN, _MORE_MEMORY))
        case Uncordon(model):
            return Decision(time, model, "resume", " because its memory is no longer needed")
        case _:
            return None


def waiting(time: datetime, model: str, grounds: Grounds) -> Decision:
    """Leaves out the models that it waits for, which may change at any time."""
    why = _lacks("it", grounds)
    return Decision(time, model, "wait", f" because {why}", waiting_change(grounds))


def reduced(time: datetime, model: str, reductions: Sequence[Reduction]) -> Decision:
    why = f": it has {'; it has '.join(reductions_text(reductions))}"
    return Decision(time, model, "smaller", why, reductions_change(reductions))


def restarted(time: datetime, model: str) -> Decision:
    return Decision(time, model, "restart", " because a command asked for it")


def updated(time: datetime, model: str) -> Decision:
    return Decision(time, model, "update", " because its file or its settings have changed")


def build_changed(time: datetime, model: str, kind: BuildKind, build: str, why: str) -> Decision:
    """A change of the build. ``build``: the new one, or for ``return`` the old one. ``why``: a clause."""
    if kind == "keep":
        return Decision(time, model, kind, f": {build} is refused, because {why}", ("Use another build.",))
    return Decision(time, model, kind, f", {build}, because {why}")


def of_event(event: PublishedEvent, time: datetime, grounds: Mapping[str, Grounds]) -> Decision | None:
    """The decision that the event reports, if it does. ``grounds``: of the current decision of the policy."""
    match event:
        case ModelUnloading(model, "memory" | "count" | "group" as lack, for_id):
            why = _evicted(for_id, grounds.get(for_id))
            return Decision(time, model, "evict", f" because {why}", (_PIN, _MORE_ROOM[lack]))
        case ModelUnloading(_, "changed", _):
            return None  # a part of the update
        case ModelUnloading(model, reason, _):
            why, change = _UNLOADED[reason]
            return Decision(time, model, "unload", f" because {why}", change)
        case LoadFailed(str() as model, error) if not event.follows_exit:
            return Decision(time, model, "refuse", f": {_clause(error.message)}", _sentences(error.remedy))
        case ServerExited(model, _, _, diagnosis, None):
            return Decision(
                time, model, "fail", f": {_clause(diagnosis.message)}", _sentences(diagnosis.remedy)
            )
        case ServerExited(model, _, _, diagnosis, _):
            smaller = "" if diagnosis.adjustment is None else f"; now with {diagnosis.adjustment}"
            why = f": {_clause(diagnosis.message)}{smaller}"
            return Decision(time, model, "restart", why, _sentences(diagnosis.remedy))
        case _:
            return None


# --- why a model waits, or is evicted


def waiting_text(grounds: Grounds) -> str:
    """A clause: what it lacks, and which models it waits for."""
    lacks = _lacks("it", grounds)
    if not grounds.lack:
        return f"{lacks}; models that are being unloaded free it"
    if grounds.chosen:
        return f"{lacks}; {_names(each.id for each in grounds.chosen)} must be unloaded first"
    return f"{lacks}, and the models that hold it are pinned, busy or loading"


def waiting_change(grounds: Grounds) -> tuple[str, ...]:
    first = (f"Unload {_names(each.id for each in grounds.chosen)}.",) if grounds.chosen else ()
    return (*first, _MORE_MEMORY)


def _needed_by(for_id: str, grounds: Grounds | None) -> str:
    return f"{for_id} needs its memory" if grounds is None else _lacks(for_id, grounds)


def _evicted(for_id: str, grounds: Grounds | None) -> str:
    if for_id:
        return _needed_by(for_id, grounds)
    exceeds = "the loaded models together exceed the budget"
    return exceeds if grounds is None else f"{exceeds} by {_amounts(grounds.lack)}"


def _lacks(who: str, grounds: Grounds) -> str:
    """A clause: what ``who`` needs and is not free. If all is free, a model that waited longer gets it."""
    if not grounds.missing:
        return f"{who} needs memory that a model gets which has waited longer"
    return " and ".join(_lack(who, key, grounds.wanted[key], grounds.free[key]) for key in grounds.missing)


def _lack(who: str, key: Resource, wanted: int, free: int) -> str:
    kind, name = key
    if kind == "memory":
        return f"{who} needs {memory_text(wanted)} of {name}, of which {memory_text(max(0, free))} is free"
    if kind == "count":
        return f"{who} needs a place, and max_loaded models are loaded"
    group, _, device = name.partition("@")
    return f"{who} is in the group {group}, of which another model is loaded on {device}"


def _amounts(lack: Demand) -> str:
    return " and ".join(
        f"{memory_text(amount)} of {name}" if kind == "memory" else f"{amount} model"
        for (kind, name), amount in lack.items()
    )


def _names(ids: Iterable[str]) -> str:
    """The id of a removed model that still holds memory ends with a space and more."""
    return " and ".join(id_.partition(" ")[0] for id_ in ids)


# --- what is smaller


def reductions_text(reductions: Sequence[Reduction]) -> list[str]:
    """Clauses such as ``2 slots instead of 4, because the larger plan does not fit in memory``."""
    return [
        f"{' and '.join(_setting(each.change) for each in same)}, because {why}"
        for why, same in groupby(reductions, lambda each: each.why)
    ]


def reductions_change(reductions: Sequence[Reduction]) -> tuple[str, ...]:
    change = []
    if any(not each.fixed for each in reductions):
        change.append(_MORE_MEMORY)
        change.append(
            "A value that you set yourself is not reduced; the model is refused if it does not fit."
        )
    if any(each.fixed for each in reductions):
        change.append("A longer context needs a model that was trained for it.")
    return tuple(change)


def _setting(change: Change) -> str:
    before, after = _number(change.before), _number(change.after)
    match change.setting:
        case "--ctx-size":
            return f"{after} tokens of context per request instead of {before}"
        case "--parallel":
            return f"{after} {'slot' if after == '1' else 'slots'} instead of {before}"
        case "--kv-type":
            return f"a KV cache of {after} instead of {before}"
        case "--gpu-layers":
            return f"{after} layers on the GPU instead of {'as many as fit' if before == 'auto' else before}"
        case _:
            return f"{change.setting} {after} instead of {before}"


def _number(text: str) -> str:
    return f"{int(text):,}" if text.isdecimal() else text


# --- texts of others


def _clause(message: str) -> str:
    return message.strip().removesuffix(".")


def _sentences(remedy: str) -> tuple[str, ...]:
    return (remedy,) if remedy else ()
