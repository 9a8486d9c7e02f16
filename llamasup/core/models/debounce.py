"""Decides which found files are complete and can be served (pure).

A download or copy may grow under its name, or have its full size from the beginning. So a new or changed
model is used once its files stay unchanged for a while. A broken model is reported after a longer time: until
then it is most likely an unfinished copy. The old model stays meanwhile. A renamed file is recognised by size
and time, and is used at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from llamasup.core.models.found import FoundModel
from llamasup.errors import LlamasupError


class DebouncePolicy(Struct, frozen=True):
    """Seconds without a change before a valid or a broken file counts.

    Programs that copy or download write several times a second; a stalled connection may pause longer.
    """

    sound_s: float = 2.0
    broken_s: float = 15.0


class _Seen(Struct, frozen=True):
    model: FoundModel
    since_s: float


class Debounced(Struct, frozen=True):
    """``models`` can be served; ``wake_at_s``: the time of the next look without an event."""

    models: tuple[FoundModel, ...] = ()
    wake_at_s: float = float("inf")
    _seen: Mapping[str, _Seen] = field(default_factory=dict[str, _Seen])


USUAL = DebouncePolicy()


def initial_state(found: Sequence[FoundModel], now_s: float) -> Debounced:
    """Begin with the files of the start, which are taken as complete."""
    return Debounced(tuple(found), _seen={model.path: _Seen(model, now_s) for model in found})


def debounce_by_age(
    before: Sequence[FoundModel],
    found: Sequence[FoundModel],
    now_s: float,
    *,
    missing: Sequence[str] = (),
) -> Debounced:
    """Decide like ``debounce``, but after one look: a file is unchanged since its modification time.

    ``now_s`` is a time of the clock of the files. Files with a time in the future are not complete yet.
    """
    seen = {model.path: _Seen(model, _written_s(model)) for model in found}
    return debounce(Debounced(tuple(before), _seen=seen), found, now_s, missing=missing)


def debounce(
    before: Debounced,
    found: Sequence[FoundModel],
    now_s: float,
    *,
    missing: Sequence[str] = (),
    policy: DebouncePolicy = USUAL,
) -> Debounced:
    """Return the next state. The models of the folders ``missing``, which cannot be read now, stay."""
    served = {model.path: model for model in before.models}
    here = {model.path for model in found}
    unreadable = below(missing)
    absent = [model for model in before.models if model.path not in here]
    models = [model for model in absent if model.path.startswith(unreadable)]
    gone = [model for model in absent if not model.path.startswith(unreadable)]
    moved = {_content(model) for model in gone if model.files}
    seen, wake_at_s = {}, float("inf")
    awaited: set[str] = set()
    for model in found:
        earlier, was = before._seen.get(model.path), served.get(model.path)
        since_s = earlier.since_s if earlier is not None and _same(earlier.model, model) else now_s
        seen[model.path] = _Seen(model, since_s)
        is_broken = isinstance(model.outcome, LlamasupError)
        due_s = since_s + (policy.broken_s if is_broken else policy.sound_s)
        if (
            (was is not None and _same(was, model))
            or due_s <= now_s
            or (model.files and _content(model) in moved)
        ):
            models.append(model)
            continue
        wake_at_s = min(wake_at_s, due_s)
        if was is not None:
            models.append(was)
        else:
            awaited.update(model.ids[:1])
    # A removed model stays while another file of its name is being written.
    sound = (model for model in gone if not isinstance(model.outcome, LlamasupError))
    models += (model for model in sound if awaited.intersection(model.ids[:1]))
    return Debounced(tuple(sorted(models, key=lambda model: model.path.casefold())), wake_at_s, seen)


def below(folders: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of the paths in these folders, for ``str.startswith``."""
    return tuple(f"{folder.rstrip('/')}/" for folder in folders)


def _same(one: FoundModel, other: FoundModel) -> bool:
    if isinstance(one.outcome, LlamasupError) or isinstance(other.outcome, LlamasupError):
        return one.files == other.files and str(one.outcome) == str(other.outcome)
    return one.files == other.files


def _written_s(model: FoundModel) -> float:
    return max((mtime_ns / 1e9 for _, _, mtime_ns in model.files), default=0.0)


def _content(model: FoundModel) -> tuple[tuple[int, int], ...]:
    """The sizes and times of its files, which a rename does not change."""
    return tuple((size, mtime_ns) for _, size, mtime_ns in model.files)
