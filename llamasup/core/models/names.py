"""Names of models: the id of a file, patterns, and the search for a client's name.

Which model has a name: ``rules.py`` for names of the config, ``name_bindings.py`` for names of found files.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from llamasup.core.settings.names import FORBIDDEN, MAX_LETTERS, names_of

_ENDINGS = re.compile(r"(?::latest|\.gguf|-\d{5}-of-\d{5})$")
_MAX_NEAR = 3
_SHORT = 6
_REMEMBERED = 64  # unknown names; the search for similar names takes a millisecond
_COMPARED = 32  # candidates for difflib, some 20 µs per name


def file_id(path: str) -> str:
    """Return the name of a file without part number and extension, in allowed characters; may be empty.

    Accents are dropped; each run of other characters becomes one ``-``, each run of dots one dot.
    """
    stem = names_of(path, None).name
    plain = "".join(
        letter for letter in unicodedata.normalize("NFKD", stem) if not unicodedata.combining(letter)
    )
    cleaned = re.sub(r"\.{2,}", ".", FORBIDDEN.sub("-", plain))
    return cleaned.strip("-./")[:MAX_LETTERS]


def folded(name: str) -> str:
    """Drop case, ``:latest``, ``.gguf`` and part number: equal for two spellings of one name."""
    name = name.casefold()
    while (ending := _ENDINGS.search(name)) is not None and ending.start():
        name = name[: ending.start()]
    return name


@lru_cache(maxsize=256)  # the limit of a config; each is matched with every model
def pattern(name: str) -> re.Pattern[str]:
    """Compile a pattern: ``*`` matches any characters, ``?`` one; the rest matches itself, in any case."""
    first, *others = ("".join(map(_one_letter, part)) for part in name.split("*"))
    if others:
        # The first match between two stars is as good as any later one. Atomic groups prevent other attempts,
        # with which a pattern of a hundred stars would never end.
        *middle, last = others
        first += "".join(f"(?>.*?{part})" for part in middle) + f".*{last}"
    return re.compile(first, re.IGNORECASE)


def _one_letter(letter: str) -> str:
    return "." if letter == "?" else re.escape(letter)


class NameIndex:
    """Finds models by the name in a request. Made once for each set of names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """Index ``names``: every name and alias, with the id of its model."""
        self._names = names
        # A client repeats a wrong name, and one request is looked up more than once.
        self._near = lru_cache(_REMEMBERED)(self._names_near)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NameIndex) and self._names == other._names

    __hash__ = None  # type: ignore[assignment]  # the names are a mapping

    def find(self, name: str) -> str | tuple[str, ...]:
        """Find the id of the model, or names similar to an unknown or ambiguous name, the nearest first."""
        ids = self.resolve(name)
        if len(ids) == 1:
            return ids[0]
        if len(name) > MAX_LETTERS:
            return ()
        return ids[:_MAX_NEAR] or self._near(name)

    def resolve(self, name: str) -> tuple[str, ...]:
        """List the ids of the models with this name in any spelling."""
        exact = self._names.get(name)
        if exact is not None:
            return (exact,)
        return () if len(name) > MAX_LETTERS else self._spellings.get(folded(name), ())

    @cached_property
    def _spellings(self) -> Mapping[str, tuple[str, ...]]:
        """Folded name → ids. The name of a repository stands for its only quantization."""
        spellings: dict[str, dict[str, None]] = {}
        repositories: dict[str, dict[str, None]] = {}
        for name, model in self._names.items():
            spellings.setdefault(folded(name), {})[model] = None
            repository, colon, _ = name.rpartition(":")
            if colon and "/" in repository:
                repositories.setdefault(folded(repository), {})[model] = None
        return {spelling: tuple(models) for spelling, models in (repositories | spellings).items()}

    def _names_near(self, name: str) -> tuple[str, ...]:
        """Compares only names that share pieces with it: all names would take 20 ms."""
        shared: Counter[str] = Counter()
        for piece in _pieces(name):
            shared.update(self._by_piece.get(piece, ()))
        candidates = {candidate.casefold(): candidate for candidate, _ in shared.most_common(_COMPARED)}
        wanted = name.casefold()
        near = difflib.get_close_matches(wanted, candidates, n=_MAX_NEAR, cutoff=0.6)
        if len(wanted) > 2:  # an abbreviation
            near += [candidate for candidate in candidates if wanted in candidate and candidate not in near]
        return tuple(candidates[candidate] for candidate in near[:_MAX_NEAR])

    @cached_property
    def _by_piece(self) -> Mapping[str, list[str]]:
        by_piece: dict[str, list[str]] = {}
        for name in self._names:
            for piece in _pieces(name):
                by_piece.setdefault(piece, []).append(name)
        return by_piece


def _pieces(name: str) -> Iterable[str]:
    """Pairs of letters; for short names also the letters, since swapped letters share no pair."""
    letters = name.casefold()
    pairs = {letters[start : start + 2] for start in range(len(letters) - 1)}
    return pairs | set(letters) if len(letters) <= _SHORT else pairs
