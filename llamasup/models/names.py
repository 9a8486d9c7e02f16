"""Names of models: which are allowed (X10), what a file is called by, and what a client may have meant."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from llamasup.llama_server.settings import names_of

__all__ = ["NameIndex", "file_id", "folded", "is_pattern", "pattern", "why_not_a_name"]

_MAX_LETTERS = 256  # of a name: longer ones are nobody's, and would make comparing them costly
_ALLOWED = re.compile(r"[A-Za-z0-9._/:@+-]+")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._/:@+-]+")
_ENDINGS = re.compile(r"(?::latest|\.gguf|-\d{5}-of-\d{5})$")
_SHOWN_NEAR = 3
_SHORT = 6
_REMEMBERED = 64  # unknown names; finding what is near one of them takes a millisecond
_COMPARED = 32  # candidates that difflib looks at, at some 20 µs each


def why_not_a_name(name: str) -> str:
    """What is wrong with a name that somebody gave; empty if nothing is."""
    if not name:
        return "is empty"
    if len(name) > _MAX_LETTERS:
        return f"has {len(name)} letters, and {_MAX_LETTERS} are allowed"
    if (bad := _FORBIDDEN.search(name)) is not None:
        return f"has {bad[0][:8]!r} in it; allowed are letters, digits and . _ / : @ + -"
    if ".." in name:
        return "has '..' in it, as paths do that lead out of a folder"
    if name.startswith("/"):
        return "begins with '/', as absolute paths do"
    return ""


def file_id(path: str) -> str:
    """The name of a file without part number and ending, in allowed letters; empty where none is left.

    Accents are dropped; each run of other letters becomes one ``-``, each run of dots one dot.
    """
    stem = names_of(path, None).name
    plain = "".join(
        letter for letter in unicodedata.normalize("NFKD", stem) if not unicodedata.combining(letter)
    )
    cleaned = re.sub(r"\.{2,}", ".", _FORBIDDEN.sub("-", plain))
    return cleaned.strip("-./")[:_MAX_LETTERS]


def folded(name: str) -> str:
    """What two spellings of one name have in common: case, ``:latest``, ``.gguf`` and a part's number say
    nothing.
    """
    name = name.casefold()
    while (ending := _ENDINGS.search(name)) is not None and ending.start():
        name = name[: ending.start()]
    return name


def is_pattern(name: str) -> bool:
    return "*" in name or "?" in name


@lru_cache(maxsize=256)  # all that a config may have, each tried on every model
def pattern(name: str) -> re.Pattern[str]:
    """``*`` is any letters, ``?`` one; the rest is meant as it is written, in any case."""
    first, *others = ("".join(map(_one_letter, part)) for part in name.split("*"))
    if others:
        # Between two stars the first place that fits is as good as any later one, so that none is tried
        # again (atomic groups): a pattern of a hundred stars would take longer than anybody waits.
        *middle, last = others
        first += "".join(f"(?>.*?{part})" for part in middle) + f".*{last}"
    return re.compile(first, re.IGNORECASE)


def _one_letter(letter: str) -> str:
    return "." if letter == "?" else re.escape(letter)


class NameIndex:
    """Finds names by what a client wrote. Made once for each set of names; a thousand of them are few."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """``names``: every name and alias → the id of its model."""
        self._names = names
        # A client that asks for what there is not goes on asking, and one request looks more than once.
        self._near = lru_cache(_REMEMBERED)(self._names_near)

    def find(self, name: str) -> str | tuple[str, ...]:
        """The id; or, where that cannot be told, the names that are near, the nearest first."""
        meant = self.meant(name)
        if len(meant) == 1:
            return meant[0]
        if len(name) > _MAX_LETTERS:
            return ()
        return meant[:_SHOWN_NEAR] or self._near(name)

    def meant(self, name: str) -> tuple[str, ...]:
        """The ids of those that may be meant by it. None is looked for that is only near."""
        exact = self._names.get(name)
        if exact is not None:
            return (exact,)
        return () if len(name) > _MAX_LETTERS else self._spellings.get(folded(name), ())

    @cached_property
    def _spellings(self) -> Mapping[str, tuple[str, ...]]:
        """Folded name → ids. A repository's own name means its only quantization."""
        spellings: dict[str, dict[str, None]] = {}
        repositories: dict[str, dict[str, None]] = {}
        for name, model in self._names.items():
            spellings.setdefault(folded(name), {})[model] = None
            repository, colon, _ = name.rpartition(":")
            if colon and "/" in repository:
                repositories.setdefault(folded(repository), {})[model] = None
        return {each: tuple(models) for each, models in (repositories | spellings).items()}

    def _names_near(self, name: str) -> tuple[str, ...]:
        """Compares only names that share pieces with it: the whole list would take 20 ms."""
        shared: Counter[str] = Counter()
        for piece in _pieces(name):
            shared.update(self._by_piece.get(piece, ()))
        candidates = {each.casefold(): each for each, _ in shared.most_common(_COMPARED)}
        wanted = name.casefold()
        near = difflib.get_close_matches(wanted, candidates, n=_SHOWN_NEAR, cutoff=0.6)
        if len(wanted) > 2:  # somebody who was too lazy for the rest of it
            near += [each for each in candidates if wanted in each and each not in near]
        return tuple(candidates[each] for each in near[:_SHOWN_NEAR])

    @cached_property
    def _by_piece(self) -> Mapping[str, list[str]]:
        by_piece: dict[str, list[str]] = {}
        for name in self._names:
            for piece in _pieces(name):
                by_piece.setdefault(piece, []).append(name)
        return by_piece


def _pieces(name: str) -> Iterable[str]:
    """Pairs of letters; of short names the letters too, since two in the wrong order share no pair."""
    letters = name.casefold()
    pairs = {letters[start : start + 2] for start in range(len(letters) - 1)}
    return pairs | set(letters) if len(letters) <= _SHORT else pairs
