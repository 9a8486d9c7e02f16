"""Which of the files that are found right now are to be served: those that nobody is still writing (pure).

A download or copy grows under its name, or has its whole size from the beginning and is filled. So a model
that is new or has changed counts once its files have stayed as they are for a while, and one that is broken
is called so only after a longer one: until then it is most likely half a copy. What was served before stays
in its place meanwhile. A file that was renamed is known by size and time, and counts at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamasup.errors import LlamasupError
from llamasup.models.found import FoundModel

__all__ = ["DebouncePolicy", "Debounced", "debounce", "debounce_by_age", "initial_state"]


@dataclass(frozen=True, slots=True)
class DebouncePolicy:
    """Seconds that files have to stay as they are: sound ones, and those that look broken.

    Programs that copy or download write several times a second; a connection that stalls may pause longer.
    """

    sound_s: float = 2.0
    broken_s: float = 15.0


@dataclass(frozen=True, slots=True)
class _Seen:
    model: FoundModel
    since_s: float


@dataclass(frozen=True, slots=True)
class Debounced:
    """``models`` are what is to be served; ``wake_at_s`` is when to look again though nothing is reported."""

    models: tuple[FoundModel, ...] = ()
    wake_at_s: float = float("inf")
    _seen: Mapping[str, _Seen] = field(default_factory=dict[str, _Seen])


_USUAL = DebouncePolicy()


def initial_state(found: Sequence[FoundModel], now_s: float) -> Debounced:
    """What is there at the start is taken as it is."""
    return Debounced(tuple(found), _seen={each.path: _Seen(each, now_s) for each in found})


def debounce_by_age(
    before: Sequence[FoundModel],
    found: Sequence[FoundModel],
    now_s: float,
    *,
    missing: Sequence[str] = (),
    policy: DebouncePolicy = _USUAL,
) -> Debounced:
    """As ``settle``, after one look: a file is as it is since it was written. ``now_s`` is by the clock of
    the files' times; what is dated in the future has to be watched.
    """
    seen = {each.path: _Seen(each, _written_s(each)) for each in found}
    return debounce(Debounced(tuple(before), _seen=seen), found, now_s, missing=missing, policy=policy)


def debounce(
    before: Debounced,
    found: Sequence[FoundModel],
    now_s: float,
    *,
    missing: Sequence[str] = (),
    policy: DebouncePolicy = _USUAL,
) -> Debounced:
    """What is to be served now, after ``before``.

    ``missing`` are folders that cannot be looked into just now: what was served from there stays, since it is
    not known to be gone.
    """
    served = {each.path: each for each in before.models}
    here = {each.path for each in found}
    out_of_sight = tuple(f"{folder.rstrip('/')}/" for folder in missing)
    kept = [each for each in before.models if each.path not in here and each.path.startswith(out_of_sight)]
    gone = [each for each in before.models if not (each.path in here or each.path.startswith(out_of_sight))]
    moved = {_content(each) for each in gone if each.files}
    models, seen, wake_at_s = list(kept), {}, float("inf")
    awaited: set[str] = set()
    for each in found:
        earlier, was = before._seen.get(each.path), served.get(each.path)
        since_s = earlier.since_s if earlier is not None and _same(earlier.model, each) else now_s
        seen[each.path] = _Seen(each, since_s)
        is_broken = isinstance(each.outcome, LlamasupError)
        due_s = since_s + (policy.broken_s if is_broken else policy.sound_s)
        if (
            (was is not None and _same(was, each))
            or due_s <= now_s
            or (each.files and _content(each) in moved)
        ):
            models.append(each)
            continue
        wake_at_s = min(wake_at_s, due_s)
        if was is not None:
            models.append(was)
        else:
            awaited.update(each.ids[:1])
    # Another file under the name of one that is gone takes its place once it has settled.
    sound = (each for each in gone if not isinstance(each.outcome, LlamasupError))
    models += (each for each in sound if awaited.intersection(each.ids[:1]))
    return Debounced(tuple(sorted(models, key=lambda each: each.path.casefold())), wake_at_s, seen)


def _same(one: FoundModel, other: FoundModel) -> bool:
    if isinstance(one.outcome, LlamasupError) or isinstance(other.outcome, LlamasupError):
        return one.files == other.files and str(one.outcome) == str(other.outcome)
    return one.files == other.files


def _written_s(model: FoundModel) -> float:
    return max((mtime_ns / 1e9 for _, _, mtime_ns in model.files), default=0.0)


def _content(model: FoundModel) -> tuple[tuple[int, int], ...]:
    """What a renamed model keeps: the sizes and times of its files."""
    return tuple((size, mtime_ns) for _, size, mtime_ns in model.files)
