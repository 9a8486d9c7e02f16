"""The text of the prompts of a measurement: sentences that a seed puts together, none of them twice (pure).

Written text would have to be repeated for a long prompt, and drafts from the context would find each
repetition. The words are those of a plain story, written for it and under the licence of llamasup.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import shake_256

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
