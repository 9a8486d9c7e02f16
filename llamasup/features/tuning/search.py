"""The search for a better configuration: which measurement is next, and what each one changes (pure).

1. *Screening.* Each candidate is compared with the default in a few pairs. Successive halving: candidates
   that are not better leave, of the others at most half (never fewer than five) get twice as many pairs.
2. *Combination.* The best candidates of different groups are joined, without those that contradict a better
   one, and compared with the default as a whole. If it fails, the weakest part is left out.
3. *Proof.* The combination, or the best single candidate, is compared with the default again, from fresh
   processes and with new measurements only, until the sequential test decides. So the choice among many
   candidates cannot inflate the gain. If this proof fails, the other of the two gets one, and no more.

Screening has no error rate and needs none: it only chooses what is proven. A candidate that crashes or does
not fit in memory is out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.planning.measured.paired import MIN_PAIRS, Interval, Verdict, bounds, judge
from llamasup.core.planning.measured.tuned import NO_CHANGES, Changes
from llamasup.features.tuning.candidates import Candidate, contradict

_PAIRS = (3, 6, 12)
_COMBINED_PAIRS = 6
_MOST_IN_NEXT_RUNG = 5
_WORTHWHILE = 0.01  # in the log: a screened gain below it is not worth a proof
_FACTOR_OF_TWO = 0.7  # in the log
MOST_ROUNDS = 40
COMBINATION = "combination"
_MOST_PROOFS = 2  # the error rate of a tuning is that of a proof, as many times
_NO_TIME = "no time to try it"

EntryState = Literal["open", "out", "failed", "lossy"]


class Entry(Struct, frozen=True):
    """A candidate with the log-ratios of its pairs. ``why``: the reason if it is out."""

    candidate: Candidate
    ratios: tuple[float, ...] = ()
    state: EntryState = "open"
    why: str = ""

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def gain(self) -> float:
        """The log of the gain so far."""
        return median(self.ratios) if self.ratios else 0.0


class Proof(Struct, frozen=True):
    """A comparison from fresh processes: one ratio of each round."""

    candidate: Candidate
    ratios: tuple[float, ...] = ()
    verdict: Verdict = Verdict.UNDECIDED
    why: str = ""


class Search(msgspec.Struct, frozen=True):
    """The whole state, which is saved after each step. ``proofs``: those made or to be made, in order."""

    entries: tuple[Entry, ...]
    phase: Literal["screen", "combine", "proof", "done"] = "screen"
    rung: int = 0
    combined: Entry | None = None
    proofs: tuple[Proof, ...] = ()

    @property
    def screened(self) -> tuple[Entry, ...]:
        """The candidates, and their combination if there is one."""
        return self.entries if self.combined is None else (*self.entries, self.combined)


class Screen(Struct, frozen=True):
    """Compare this candidate with the default in ``pairs`` pairs."""

    candidate: Candidate
    pairs: int


class ProofRound(Struct, frozen=True):
    """Compare this candidate with the default once, from fresh processes. ``number`` counts from 1."""

    candidate: Candidate
    number: int


class Done(Struct, frozen=True):
    pass


Step = Screen | ProofRound | Done


def begin(candidates: Sequence[Candidate]) -> Search:
    return _advanced(Search(tuple(map(Entry, candidates))))


def begin_proof(candidate: Candidate) -> Search:
    """Begin a proof without a screening. With this, it is measured how often a proof is wrong."""
    return Search((Entry(candidate),), phase="proof", proofs=(Proof(candidate),))


def next_step(search: Search) -> Step:
    """Return what to measure next."""
    match search.phase:
        case "screen":
            entry = next(one for one in search.entries if _is_due(one, search.rung))
            return Screen(entry.candidate, _PAIRS[search.rung] - len(entry.ratios))
        case "combine":
            assert search.combined is not None
            return Screen(search.combined.candidate, _COMBINED_PAIRS - len(search.combined.ratios))
        case "proof":
            proof = _current(search)
            return ProofRound(proof.candidate, len(proof.ratios) + 1)
        case _:
            return Done()


def observed(search: Search, candidate: Candidate, ratios: Sequence[float]) -> Search:
    """Return the search after pairs (or a round) of ``candidate``, the one of ``next_step``."""
    if search.phase == "proof":
        return _with_proof(search, (*_current(search).ratios, *ratios))
    return _advanced(_with_entry(search, candidate, lambda entry: _with_ratios(entry, ratios)))


def failed(search: Search, candidate: Candidate, why: str, state: EntryState = "failed") -> Search:
    """Return the search after ``candidate`` crashed, did not fit, or (``lossy``) changed the answers too
    much.
    """
    if search.phase == "proof":
        proof = replace(_current(search), verdict=Verdict.NOT_BETTER, why=why)
        return _replaced(search, proof)
    search = _with_entry(search, candidate, lambda entry: replace(entry, state=state, why=why))
    if search.phase == "combine" and len(parts := _parts(search)) > 2:
        return replace(search, combined=Entry(_joined(parts[:-1])))
    return _advanced(search)


def is_hopeless(ratios: Sequence[float]) -> bool:
    """Whether the screening of a candidate ends, since it would take long for nothing.

    It had half of the speed in each pair, and two pairs at least: one can be a moment of a noisy neighbour.
    """
    return len(ratios) > 1 and max(ratios) < -_FACTOR_OF_TWO


def worth_proving(search: Search) -> bool:
    """Whether a candidate looks better so far."""
    return any(one.gain >= _WORTHWHILE for one in _open(search))


def hurry(search: Search) -> Search:
    """End the screening now, because the rest of the time is needed for the proof."""
    if search.phase == "screen":
        entries = tuple(
            one if one.ratios or one.state != "open" else replace(one, state="out", why=_NO_TIME)
            for one in search.entries
        )
        return _chosen(replace(search, entries=entries), combines=False)
    if search.phase == "combine":
        return _to_proof(search)
    return search


def reopened(search: Search) -> Search:
    """Return the search in a later call: candidates for which there was no time are tried, if a proof is
    left.

    A proof that has begun continues if its candidate is still chosen then.
    """
    begun = tuple(one for one in search.proofs if one.ratios)
    untried = [one for one in search.entries if one.why == _NO_TIME]
    if search.phase == "done" or not untried or len(begun) == _MOST_PROOFS:
        return search
    entries = tuple(
        replace(one, state="open", why="") if one.why == _NO_TIME else one for one in search.entries
    )
    return Search(entries, proofs=begun)


def result(search: Search) -> Proof | None:
    """Return the proof of a better configuration, if there is one."""
    return next((proof for proof in search.proofs if proof.verdict is Verdict.BETTER), None)


def proven(proof: Proof) -> Interval:
    """Return the gain of a proof with its bounds."""
    return bounds(proof.ratios)


def trials(search: Search) -> int:
    """Return how many pairs and rounds were measured."""
    return sum(len(one.ratios) for one in search.screened) + sum(len(one.ratios) for one in search.proofs)


# --- transitions ---------------------------------------------------------------------------------


def _with_ratios(entry: Entry, ratios: Sequence[float]) -> Entry:
    entry = replace(entry, ratios=(*entry.ratios, *ratios))
    if is_hopeless(entry.ratios):
        return replace(entry, state="out", why="much worse than the default")
    return entry


def _is_due(entry: Entry, rung: int) -> bool:
    return entry.state == "open" and len(entry.ratios) < _PAIRS[rung]


def _advanced(search: Search) -> Search:
    """The search in the phase of its next measurement."""
    if search.phase == "screen":
        while not any(_is_due(one, search.rung) for one in search.entries):
            search = _halved(search)
            if search.rung + 1 == len(_PAIRS) or _is_chosen(_open(search)):
                return _chosen(search, combines=True)
            search = replace(search, rung=search.rung + 1)
        return search
    combined = search.combined
    assert combined is not None
    if combined.state != "open" or len(combined.ratios) >= _COMBINED_PAIRS:
        return _to_proof(search)
    return search


def _is_chosen(left: Sequence[Entry]) -> bool:
    """Whether there is no choice any more. One that only may be better is measured again."""
    return len(left) < 2 and all(one.gain >= _WORTHWHILE for one in left)


def _open(search: Search) -> list[Entry]:
    return [one for one in search.entries if one.state == "open"]


def _halved(search: Search) -> Search:
    """Drop the candidates that are not better, then the worse half, but not below ``_MOST_IN_NEXT_RUNG``.

    A candidate that was twice as fast in one pair, and not in most, is measured again: this is noise. Of each
    group the best goes first, since a configuration has only one of a group.
    """
    ranked = sorted(
        (one for one in _open(search) if one.gain > 0 or max(one.ratios) > _FACTOR_OF_TWO),
        key=lambda one: one.gain,
        reverse=True,
    )
    places: dict[str, int] = {}
    for one in ranked:
        places[one.name] = sum(
            other.candidate.group == one.candidate.group for other in ranked[: len(places)]
        )
    ranked.sort(key=lambda one: (places[one.name], -one.gain))
    keep = {one.name for one in ranked[: max(_MOST_IN_NEXT_RUNG, (len(ranked) + 1) // 2)]}
    return replace(
        search,
        entries=tuple(
            one if one.state != "open" or one.name in keep else replace(one, state="out", why=_why_out(one))
            for one in search.entries
        ),
    )


def _why_out(entry: Entry) -> str:
    return "not better than the default" if entry.gain <= 0 else "others were better"


def _chosen(search: Search, *, combines: bool) -> Search:
    """The best candidate of each group, if it is worth a proof; joined if there are several."""
    best: dict[str, Entry] = {}
    for entry in _open(search):
        held = best.get(entry.candidate.group)
        if entry.gain >= _WORTHWHILE and (held is None or entry.gain > held.gain):
            best[entry.candidate.group] = entry
    winners = sorted(best.values(), key=lambda one: one.gain, reverse=True)
    if not winners:
        return replace(search, phase="done")
    joined: list[Entry] = []
    for one in winners:
        if not any(contradict(one.candidate.changes, other.candidate.changes) for other in joined):
            joined.append(one)
    if len(joined) == 1:
        return _proving(search, [joined[0].candidate])
    search = replace(search, phase="combine", combined=Entry(_joined(joined)))
    return search if combines else _to_proof(search)


def _joined(parts: Sequence[Entry]) -> Candidate:
    changes = sum((one.candidate.changes for one in parts), NO_CHANGES)
    lossy = any(one.candidate.lossy for one in parts)
    return Candidate(COMBINATION, changes, "the best changes together", lossy)


def _parts(search: Search) -> list[Entry]:
    """The parts of the combination, the best first."""
    assert search.combined is not None
    whole = search.combined.candidate.changes
    parts = [one for one in _open(search) if _is_part(one.candidate.changes, whole)]
    return sorted(parts, key=lambda one: one.gain, reverse=True)


def _to_proof(search: Search) -> Search:
    """Prove the better of the combination and its best part first."""
    assert search.combined is not None
    combined, single = search.combined, _parts(search)[0]
    order = [single.candidate]
    if combined.state == "open":
        is_better = not combined.ratios or combined.gain >= single.gain
        order.insert(0 if is_better else 1, combined.candidate)
    return _proving(search, order)


def _proving(search: Search, chosen: Sequence[Candidate]) -> Search:
    """Prove the chosen ones in this order, after the proofs that have begun, and not too many in all."""
    begun = [
        one
        if one.verdict is Verdict.NOT_BETTER or one.candidate in chosen
        else replace(one, verdict=Verdict.NOT_BETTER, why="others were better")
        for one in search.proofs
    ]
    new = [Proof(one) for one in chosen if all(one != proof.candidate for proof in begun)]
    proofs = (*begun, *new)[:_MOST_PROOFS]
    is_over = all(one.verdict is Verdict.NOT_BETTER for one in proofs)
    return replace(search, phase="done" if is_over else "proof", proofs=proofs)


def _is_part(part: Changes, whole: Changes) -> bool:
    return set(part.flags) <= set(whole.flags) and set(part.env) <= set(whole.env)


def _current(search: Search) -> Proof:
    undecided = (one for one in search.proofs if one.verdict is Verdict.UNDECIDED)
    return next(undecided, search.proofs[-1])


def _with_proof(search: Search, ratios: tuple[float, ...]) -> Search:
    proof = _current(search)
    verdict, why = judge(ratios), ""
    if verdict is Verdict.UNDECIDED and len(ratios) >= MIN_PAIRS and median(ratios) <= 0:
        verdict, why = Verdict.NOT_BETTER, "no gain in half of the rounds"
    elif verdict is Verdict.UNDECIDED and len(ratios) >= MOST_ROUNDS:
        verdict, why = Verdict.NOT_BETTER, f"not proven in {MOST_ROUNDS} rounds"
    return _replaced(search, replace(proof, ratios=ratios, verdict=verdict, why=why))


def _replaced(search: Search, proof: Proof) -> Search:
    """Return the search with ``proof`` in place of the current one. A decided search is done."""
    current = _current(search)
    proofs = tuple(proof if one is current else one for one in search.proofs)
    if proof.verdict is Verdict.BETTER or all(one.verdict is Verdict.NOT_BETTER for one in proofs):
        return replace(search, proofs=proofs, phase="done")
    return replace(search, proofs=proofs)


def _with_entry(search: Search, candidate: Candidate, change: Callable[[Entry], Entry]) -> Search:
    if search.phase == "combine":
        assert search.combined is not None
        return replace(search, combined=change(search.combined))
    entries = (change(one) if one.name == candidate.name else one for one in search.entries)
    return replace(search, entries=tuple(entries))
