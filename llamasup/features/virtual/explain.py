"""Writes the sentences of ``llamasup why`` about a virtual model (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from llamasup.core.http.routes import Work
from llamasup.core.pool.why.state_reasons import Explanation
from llamasup.core.queueing.served_load import ServedLoad
from llamasup.core.queueing.wait_estimate import eta_text
from llamasup.features.virtual.choice import RULE, choose


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
