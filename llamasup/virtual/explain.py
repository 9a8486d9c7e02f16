"""Sentences about a virtual model, for ``llamasup why`` (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from llamasup.pool.why.explain import Explanation
from llamasup.queueing.served_load import ServedLoad
from llamasup.queueing.wait_estimate import eta_text
from llamasup.virtual.choice import RULE, Choice

__all__ = ["explain_virtual"]


def explain_virtual(
    name: str, loads: Sequence[tuple[str, ServedLoad]], choice: Choice | None, missing: Sequence[str]
) -> Explanation:
    """``loads``: of the models that exist; ``choice`` is one of them. ``missing``: names without a model."""
    sentences, change = [], []
    ids = [id_ for id_, _ in loads]
    if len(loads) + len(missing) > 1:
        sentences.append(f"{name} is a virtual model, for one of {', '.join([*ids, *missing])}. {RULE}")
        sentences += [_of_model(id_, load) for id_, load in loads]
    elif choice is not None:
        sentences.append(f"{name} is a virtual model: its requests go to {ids[0]}.")
    for model in missing:
        sentences.append(f"There is no model {model}.")
        change.append(f"Add the model {model}, or remove it from the virtual model {name} in the config.")
    if choice is not None and len(loads) > 1:
        sentences.append(f"A request now takes {ids[choice.index]}, because {choice.reason}.")
    return Explanation(tuple(sentences), tuple(change))


def _of_model(id_: str, load: ServedLoad) -> str:
    queue = f", and {load.waiting} waiting" if load.waiting else ""
    if load.slots:
        return f"{id_} is loaded: {load.free} of {load.slots} slots are free{queue}."
    if not load.loads:
        cannot = "" if load.can_serve else ", and takes no requests now"
        return f"{id_} is not loaded{cannot}{queue}."
    eta = "" if load.eta_s is None else f", about {eta_text(load.eta_s)} left"
    return f"{id_} is being loaded{eta}{queue}."
