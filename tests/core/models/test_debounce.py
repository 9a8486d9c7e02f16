"""The debounce of a folder's files, check after check: an incomplete copy is not served."""

from __future__ import annotations

from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.models.debounce import Debounced, DebouncePolicy, debounce, debounce_by_age, initial_state
from llamasup.core.models.found import FoundModel
from llamasup.errors import ModelInvalid
from tests.kit import models

POLICY = DebouncePolicy(sound_s=2.0, broken_s=15.0)
FOREVER = float("inf")


def facts() -> ModelFacts:
    content = models.tiny_decoder()
    found = read_header(content, len(content))
    assert isinstance(found, ModelFacts)
    return found


WHOLE = facts()


def model(path: str, size: int = 100, mtime_ns: int = 1) -> FoundModel:
    return FoundModel(path, WHOLE, ((path, size, mtime_ns),), (path,))


def broken(path: str, size: int, *, of: int = 100) -> FoundModel:
    return replace(model(path, size, mtime_ns=size), outcome=ModelInvalid(f"truncated: {size} of {of} bytes"))


def at_start(*found: FoundModel) -> Debounced:
    return initial_state(found, 0.0)


def look(before: Debounced, now_s: float, *found: FoundModel, missing: tuple[str, ...] = ()) -> Debounced:
    return debounce(before, found, now_s, missing=missing, policy=POLICY)


def test_files_of_the_start_count_at_once() -> None:
    there, half = model("/m/a.gguf"), broken("/m/b.gguf", 10)
    settled = look(at_start(there, half), 1.0, there, half)
    assert settled.models == (there, half)
    assert settled.wake_at_s == FOREVER


def test_new_model_counts_once_its_files_are_stable() -> None:
    a, b = model("/m/a.gguf"), model("/m/b.gguf")
    settled = look(at_start(a), 10.0, a, b)
    assert settled.models == (a,)
    assert settled.wake_at_s == 12.0
    settled = look(settled, 11.9, a, b)
    assert settled.models == (a,)
    settled = look(settled, 12.0, a, b)
    assert settled.models == (a, b)
    assert settled.wake_at_s == FOREVER


def test_preallocated_file_counts_after_its_last_write() -> None:
    settled = look(at_start(), 1.0, model("/m/a.gguf", mtime_ns=1))
    settled = look(settled, 2.5, model("/m/a.gguf", mtime_ns=2))
    assert settled.wake_at_s == 4.5
    settled = look(settled, 4.0, model("/m/a.gguf", mtime_ns=2))
    assert settled.models == ()
    assert look(settled, 4.5, model("/m/a.gguf", mtime_ns=2)).models == (model("/m/a.gguf", mtime_ns=2),)


def test_growing_copy_is_neither_a_model_nor_a_problem() -> None:
    settled = at_start()
    for second in range(1, 60, 10):
        settled = look(settled, float(second), broken("/m/a.gguf", second))
        assert settled.models == ()
        assert settled.wake_at_s == second + 15.0
    settled = look(settled, 60.0, model("/m/a.gguf"))
    assert look(settled, 62.0, model("/m/a.gguf")).models == (model("/m/a.gguf"),)


def test_stalled_copy_becomes_a_problem() -> None:
    half = broken("/m/a.gguf", 50)
    settled = look(at_start(), 1.0, half)
    assert look(settled, 15.9, half).models == ()
    assert look(settled, 16.0, half).models == (half,)


def test_old_model_stays_until_its_replacement_is_complete() -> None:
    old, new = model("/m/a.gguf", mtime_ns=1), model("/m/a.gguf", mtime_ns=9)
    settled = look(at_start(old), 1.0, broken("/m/a.gguf", 10))
    assert settled.models == (old,)
    settled = look(settled, 2.0, new)
    assert settled.models == (old,)
    settled = look(settled, 4.0, new)
    assert settled.models == (new,)


def test_removed_file_is_gone_at_once() -> None:
    a, b = model("/m/a.gguf"), model("/m/b.gguf")
    assert look(at_start(a, b), 1.0, b).models == (b,)


def test_renamed_file_counts_at_once() -> None:
    old, new = model("/m/a.gguf", mtime_ns=77), model("/m/b.gguf", mtime_ns=77)
    settled = look(at_start(old), 1.0, new)
    assert settled.models == (new,)
    assert settled.wake_at_s == FOREVER


def test_broken_links_are_not_taken_for_a_rename() -> None:
    gone = replace(broken("/m/a.gguf", 0), files=())
    assert look(at_start(gone), 1.0, replace(gone, path="/m/b.gguf")).models == ()


def test_models_of_an_unreadable_folder_stay() -> None:
    a, b, c = model("/m/a.gguf"), model("/other/b.gguf"), model("/m/c.gguf")
    settled = look(at_start(a, b, c), 1.0, b, missing=("/m",))
    assert settled.models == (a, c, b)
    settled = look(settled, 2.0, a, b)
    assert settled.models == (a, b)
    assert settled.wake_at_s == FOREVER


def test_changed_error_of_a_broken_file_waits_again() -> None:
    half, other = broken("/m/a.gguf", 50), broken("/m/a.gguf", 60)
    settled = look(at_start(half), 1.0, other)
    assert settled.models == (half,)
    assert look(settled, 16.0, other).models == (other,)


def test_debounce_by_age_uses_modification_times() -> None:
    def at(second: int, path: str, *, sound: bool = True) -> FoundModel:
        made = model(path, mtime_ns=second * 10**9)
        return made if sound else replace(made, outcome=ModelInvalid("truncated"))

    served, replaced = at(1, "/m/a.gguf"), at(1, "/m/b.gguf")
    new = at(99, "/m/b.gguf")
    old, fresh = at(90, "/m/c.gguf"), at(99, "/m/d.gguf")
    cut, quiet = at(90, "/m/e.gguf", sound=False), at(80, "/m/f.gguf", sound=False)
    future = at(1000, "/m/g.gguf")
    nowhere = FoundModel("/m/h.gguf", ModelInvalid("gone in this moment"))
    found = (served, new, old, fresh, cut, quiet, future, nowhere)
    settled = debounce_by_age((served, replaced, model("/n/x.gguf")), found, 100.0, missing=["/n"])
    assert settled.models == (served, replaced, old, quiet, nowhere, model("/n/x.gguf"))
    assert settled.wake_at_s == 101.0


def test_removed_model_stays_while_a_file_of_its_name_is_written() -> None:
    """For example, when the hub's cache gets a newer revision of a model."""
    old = replace(model("/hub/old/x.gguf"), ids=("org/repo:Q8_0",))
    new = replace(model("/hub/new/x.gguf", 200), ids=("org/repo:Q8_0",))
    other = model("/hub/y.gguf")
    settled = look(at_start(old, other), 10.0, new)
    assert settled.models == (old,)
    assert settled.wake_at_s == 12.0
    assert look(settled, 12.0, new).models == (new,)
    assert look(settled, 12.0).models == ()
