"""A comparison of two servers in pairs: the sequential test, and the text of the prompts (pure).

The test says whether a candidate is better than the default, by the signs of interleaved pairs.

Each pair is one measurement of the candidate and one of the default, right after each other, in an order
drawn at random. Its log-ratio is positive if the candidate was better. If the two are the same, the draw
makes the sign of each pair a fair coin, whatever the machine does: noise with heavy tails, a neighbour, a
drift, a throttled CPU. (A fixed order such as ABBA cancels a drift only if it is linear.) Only the sign of a
ratio counts, so no outlier can decide.

*Method.* Let ``wins`` of ``n`` pairs be above a ratio. A gambler who bets on wins against a fair coin, with a
uniform mixture over all win rates above one half, has the wealth

    W(n, wins) = (sum of C(n + 1, j) for j = 0 … wins) / ((n + 1) C(n, wins)).

Under a fair coin W is a martingale that begins at 1, so it *ever* reaches 1/α with a probability of at most α
(Ville's inequality). The test may therefore look after each pair, and stop or continue. The ratios that this
test does not reject form a confidence interval for the median ratio; its ends are order statistics.

*Error rate.* With ``ALPHA`` = 0.0125 for each side, a candidate that is no better is called better with a
probability of at most 1.25 %. A tuning makes at most two such proofs, so it takes a change that is no gain in
at most 2.5 % of all cases.

*Bounds.* With 97.5 % confidence, the bounds of one proof contain the median ratio at every step; with 95 %
confidence, the bounds of both proofs of a tuning do. This holds before it is known whether a change is taken.
But bounds are shown only for a change that is taken, and of the small gains only the lucky proofs are: their
gain is shown too large. With noise of 10 % in each round, 0.6 % of the proofs of a true gain of 1.005 take
it; these proofs show a mean gain of 1.06, and the bounds of half of these proofs do not contain 1.005. From a
true gain of 1.05 on, this is below 1 %.

*Power.* If all pairs are won, nine are enough. A noisy neighbour makes the test longer, and does not change
the error rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from fractions import Fraction
from functools import cache
from hashlib import shake_256
from statistics import median

from msgspec import Struct

ALPHA = 0.0125
"""For each side of one proof."""

# A gain that a change of flags is worth. Below it, the search ends sooner.
_WORTHWHILE = math.log(1.01)


class Verdict(StrEnum):
    BETTER = "better"
    NOT_BETTER = "not better"
    UNDECIDED = "undecided"


class Interval(Struct, frozen=True):
    """The median gain and its bounds, as ratios: 1.2 is 20 % better. ``pairs``: how many were measured."""

    gain: float
    lower: float
    upper: float
    pairs: int


@cache
def wealth(pairs: int, wins: int) -> float:
    """The wealth of the gambler after ``wins`` of ``pairs``."""
    tail = sum(math.comb(pairs + 1, count) for count in range(wins + 1))
    return float(Fraction(tail, (pairs + 1) * math.comb(pairs, wins)))


@cache
def wins_needed(pairs: int, alpha: float = ALPHA) -> int | None:
    """The fewest wins that reject a fair coin; None if even ``pairs`` wins do not."""
    return next((wins for wins in range(pairs // 2, pairs + 1) if wealth(pairs, wins) >= 1 / alpha), None)


def _min_pairs() -> int:
    pairs = 1
    while wins_needed(pairs) is None:
        pairs += 1
    return pairs


MIN_PAIRS = _min_pairs()
"""No verdict is possible with fewer pairs."""


def bounds(ratios: Sequence[float], alpha: float = ALPHA) -> Interval:
    """The gain with its bounds. ``ratios``: log-ratios, positive if the candidate was better."""
    if not ratios:
        return Interval(1.0, 0.0, math.inf, 0)
    gain, needed = math.exp(median(ratios)), wins_needed(len(ratios), alpha)
    if needed is None:
        return Interval(gain, 0.0, math.inf, len(ratios))
    ordered = sorted(ratios)
    lower, upper = ordered[len(ratios) - needed], ordered[needed - 1]
    return Interval(gain, math.exp(lower), math.exp(upper), len(ratios))


def judge(ratios: Sequence[float], alpha: float = ALPHA) -> Verdict:
    """Judge a measurement: better if the lower bound is above 1, not better if the upper bound is not worth a
    change.
    """
    if not ratios or (needed := wins_needed(len(ratios), alpha)) is None:
        return Verdict.UNDECIDED
    ordered = sorted(ratios)
    if ordered[len(ratios) - needed] > 0:
        return Verdict.BETTER
    if ordered[needed - 1] < _WORTHWHILE:
        return Verdict.NOT_BETTER
    return Verdict.UNDECIDED


# --- the text of the prompts ----------------------------------------------------------------------

# Sentences that a seed puts together, none of them twice. Written text would have to be repeated for a long
# prompt, and drafts from the context would find each repetition. The words are those of a plain story,
# written for it and under the licence of llamasup.


# By the letters of the shapes: people, things, places, kinds, deeds, manners, times, relations of places.
_TEXT = {
    "P": (
        "fisherman teacher engineer brother neighbour captain doctor painter farmer driver clerk sailor "
        "printer baker carpenter widow student mayor nurse miner gardener cook tailor singer weaver guest "
        "child grandmother uncle stranger officer shepherd smith merchant pilot librarian"
    ),
    "T": (
        "letter rope lamp basket table window bridge boat engine ladder coat map clock stone wagon mirror "
        "kettle book pencil wheel hammer curtain bottle candle violin ticket picture key stove barrel net "
        "blanket door bell shovel drawer bench chair parcel flag compass saddle cup rail"
    ),
    "L": (
        "harbour market school station orchard river hill tower garden kitchen workshop mill church "
        "forest island valley square cellar library quarry meadow lighthouse pier tavern village canal "
        "bakery courtyard attic field"
    ),
    "K": (
        "old quiet narrow heavy bright wooden broken careful northern early distant empty patient cold "
        "young tired green simple famous hidden gentle crooked silver dusty lonely cheerful stubborn grey "
        "warm small wide honest rusty clever pale"
    ),
    "D": (
        "carried measured painted followed repaired noticed borrowed counted watched described remembered "
        "sold found hid opened cleaned lifted bought praised drew forgot examined moved finished pulled "
        "closed returned admired ordered collected turned weighed"
    ),
    "N": (
        "slowly again twice carefully silently later gladly often badly suddenly together alone proudly "
        "quickly calmly sometimes"
    ),
    "M": (
        "morning evening winter summer afternoon night autumn spring storm harvest holiday week month noon"
    ),
    "W": ("near behind above beyond around inside before under across from towards past"),
}
_WORDS = {letter: text.split() for letter, text in _TEXT.items()}
_SHAPES = (
    "the K P D the K T W the L",
    "in the K M the P of the L D a T and D the K T",
    "a P from the L D N the T that the K P had D",
    "W the K L the P D each T N",
    "the T of the P was K but the L seemed K",
    "after the M the K P D the T W a K L",
    "when the P D the K T the P of the L D N",
    "each guest of the K L D the T that a P D W the L",
)
_SHORTEST_SENTENCE = 10


def prose(seed: int, words: int) -> str:
    """Write a text of at least ``words`` words, another one for each seed."""
    sentences = -(-words // _SHORTEST_SENTENCE)
    choices = iter(shake_256(b"%d" % seed).digest(sentences * 40))
    return " ".join(_sentence(choices) for _ in range(sentences))


def _sentence(choices: Iterator[int]) -> str:
    shape = _SHAPES[next(choices) % len(_SHAPES)].split()
    words = [_WORDS[word][next(choices) % len(_WORDS[word])] if word in _WORDS else word for word in shape]
    return f"{' '.join(words).capitalize()}."
