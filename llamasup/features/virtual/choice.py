"""Decides which of its models a virtual model takes, explains the choice, and lists the model (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from llamasup.core.http.routes import Work
from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.shown_state import ListedStatus
from llamasup.core.pool.why.state_reasons import Explanation
from llamasup.core.queueing.wait_estimate import ServedLoad
from llamasup.core.system.text import eta_text
from llamasup.features.virtual.settings import VirtualEntry

RULE: Final = (
    "A request takes the first of them that is loaded and has a free slot; else the loaded one with the "
    "shortest queue for each slot; else the one that is loaded soonest; else the first that can be loaded."
)


class Choice(Struct, frozen=True):
    """A chosen model. ``index`` is its index. ``reason`` completes "a request takes … because"."""

    index: int
    reason: str


def choose(loads: Sequence[ServedLoad]) -> Choice:
    """Choose a model. ``loads`` are in the order of the config; there is at least one."""
    if len(loads) == 1:
        return Choice(0, "it is the only one that can")
    numbered = list(enumerate(loads))
    for index, load in numbered:
        if load.slots and load.free and load.can_serve:
            return Choice(index, "it is the first that is loaded and has a free slot")
    serving = [(index, load) for index, load in numbered if load.slots and load.can_serve]
    if serving:
        index, _ = min(serving, key=lambda item: (item[1].waiting + 1) / item[1].slots)
        return Choice(index, "all loaded ones are busy, and its queue is the shortest for each slot")
    loading = [(index, load) for index, load in numbered if load.loads and load.can_serve]
    if loading:
        index, load = min(loading, key=lambda item: float("inf") if item[1].eta_s is None else item[1].eta_s)
        return Choice(index, "none is loaded, and it will be the soonest")
    for index, load in numbered:
        if load.can_serve:
            return Choice(index, "none is loaded, and it is the first that can be")
    return Choice(0, "none can take it now, and it is the first")


# --- the sentences of ``llamasup why`` -------------------------------------------------------------


class Option(Struct, frozen=True):
    """A model that a request may take. ``works``: the work that it can do."""

    model: str
    load: ServedLoad
    works: tuple[Work, ...] = tuple(Work)


def explain_virtual(name: str, options: Sequence[Option], missing: Sequence[str]) -> Explanation:
    """Explain a virtual model. ``options`` are models that exist, ``missing`` names without a model."""
    sentences, change = [], []
    models = [option.model for option in options]
    if len(options) + len(missing) > 1:
        sentences.append(f"{name} is a virtual model, for one of {', '.join([*models, *missing])}. {RULE}")
        sentences += map(_of_model, options)
    elif options:
        sentences.append(f"{name} is a virtual model: its requests go to {models[0]}.")
    for model in missing:
        sentences.append(f"There is no model {model}.")
        change.append(f"Add the model {model}, or remove it from the virtual model {name} in the config.")
    if len(options) > 1:
        sentences += _choices(options)
    return Explanation(tuple(sentences), tuple(change))


def _of_model(option: Option) -> str:
    model, load = option.model, option.load
    queue = f", and {load.waiting} waiting" if load.waiting else ""
    if load.slots:
        return f"{model} is loaded: {load.free} of {load.slots} slots are free{queue}."
    if not load.loads:
        cannot = "" if load.can_serve else ", and takes no requests now"
        return f"{model} is not loaded{cannot}{queue}."
    eta = "" if load.eta_s is None else f", about {eta_text(load.eta_s)} left"
    return f"{model} is being loaded{eta}{queue}."


def _choices(options: Sequence[Option]) -> Iterator[str]:
    """The model that a request takes now; one for each kind of work, if not all models can do the same."""
    if len({option.works for option in options}) == 1:
        yield _choice("A request", options)
        return
    for work in Work:
        suited = [option for option in options if work in option.works]
        if suited:
            yield _choice(f"A request for {work.value}", suited)


def _choice(what: str, options: Sequence[Option]) -> str:
    choice = choose([option.load for option in options])
    return f"{what} now takes {options[choice.index].model}, because {choice.reason}."


# --- the entry of ``GET /v1/models`` ----------------------------------------------------------------


def listed_virtual(
    entry: VirtualEntry, target: Mapping[str, Any] | None, problem: str, model: ResolvedModel
) -> dict[str, Any]:
    """List a virtual model. ``target`` is the entry of the model that a request would take now, or None
    because of ``problem``.

    The text of the system prompt is not shown: it may be confidential.
    """
    shown: dict[str, Any] = {
        "object": "model",
        "created": 0,
        "owned_by": "llamasup",
        "tags": (),
        "status": {"value": ListedStatus.UNLOADED.value, "failed": True},
    }
    own: Mapping[str, Any] = {}
    if target is not None:
        shown |= target
        own = target.get("llamasup", {})
    virtual = {
        "model": entry.model,
        "any": list(entry.any),
        "takes": None if target is None else target["id"],
        "set": dict(entry.set),
        "default": dict(entry.default),
        "remove": list(entry.remove),
        "system": entry.system is not None,
    }
    return {
        **shown,
        "id": model.id,
        "aliases": (),
        "llamasup": {**own, "default": False, "problem": problem or own.get("problem"), "virtual": virtual},
    }
