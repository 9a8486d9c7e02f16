"""Reads security descriptors of Windows in their text form, SDDL (pure)."""

from __future__ import annotations

# Entries that give rights: plain ones, those for one object, and those with a condition.
_ALLOW = frozenset({"A", "OA", "XA", "ZA"})
_USER = 5  # after kind, flags, rights, object and inherited object
EVERYONE = "WD"


def owner_of(sddl: str) -> str:
    """Return the SID, or its two letters, of the owner; empty if the text has none."""
    if not sddl.startswith("O:"):
        return ""
    return sddl[2:].partition("G:")[0].partition("D:")[0]


def users_with_rights(sddl: str) -> frozenset[str]:
    """Return the SIDs, or their two letters, to which the access control list gives rights.

    Without entries everyone has all rights: that is how a drive without such lists looks.
    """
    entries = [entry.split(";", _USER + 1) for entry in _entries(sddl)]
    if not entries:
        return frozenset({EVERYONE})
    return frozenset(entry[_USER] for entry in entries if entry[0] in _ALLOW and len(entry) > _USER)


def _entries(sddl: str) -> list[str]:
    """The texts between outer parentheses; a condition has more of them inside."""
    entries, depth, begin = [], 0, 0
    for at, character in enumerate(sddl):
        if character == "(":
            depth += 1
            if depth == 1:
                begin = at + 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                entries.append(sddl[begin:at])
    return entries
