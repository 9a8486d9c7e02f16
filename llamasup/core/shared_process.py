"""Several names of one weight file: when one process can serve them, and what then holds for it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce

from llamasup.core.model_spec import ModelOptions

__all__ = ["can_share", "shared_options"]

_STAY = ("ttl_s", "pin", "preload", "replicas", "keep_slots")
_LIMITS = ("max_concurrent", "max_queued", "wait_timeout_s", "drain_timeout_s")
_START = tuple(each.name for each in fields(ModelOptions) if each.name not in (*_STAY, *_LIMITS))


def can_share(one: ModelOptions, other: ModelOptions) -> bool:
    """Whether one process can be started as both say: where one says nothing, the other decides."""
    return all(
        mine is None or theirs is None or mine == theirs
        for mine, theirs in ((getattr(one, name), getattr(other, name)) for name in _START)
    )


def shared_options(said: Sequence[ModelOptions], defaults: ModelOptions) -> ModelOptions:
    """What holds for the one process of several names, over the defaults: it starts as any of them says, and
    stays, is loaded and lets wait as the most generous one says.
    """
    started = reduce(lambda all_of_them, each: all_of_them.over(each), said)
    effective = [each.over(defaults) for each in said]
    most = {}
    for name in (*_STAY, *_LIMITS):
        values = [value for each in effective if (value := getattr(each, name)) is not None]
        # Who says nothing about the time to live stays for ever.
        most[name] = max(values) if values and (name != "ttl_s" or len(values) == len(said)) else None
    return replace(started.over(defaults), **most)
