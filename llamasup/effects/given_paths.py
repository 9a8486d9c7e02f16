"""Paths as people write them: ``~`` is somebody's home, and what is relative begins where they are."""

from __future__ import annotations

from pathlib import Path

from llamasup.core.errors import LlamasupError, ModelMissing

__all__ = ["expanded"]


def expanded(name: str | Path, wrong: type[LlamasupError] = ModelMissing, *, of: str = "") -> Path:
    """The absolute path that a person means by ``name``, whether anything is there or not.

    Raises ``wrong`` where it cannot be told; ``of`` is what gave the name: an option, a variable.
    """
    given = f"{of}: {name}" if of else str(name)
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        user = str(name).split("/")[0]
        raise wrong(
            f"{given}: there is no user {user.removeprefix('~')!r} whose folder {user} could be",
            remedy=f"Write the path out; for a file of that very name in this folder say ./{name}",
        ) from None
    except FileNotFoundError:
        raise wrong(
            f"{given}: the current folder no longer exists", remedy="Change to another folder (cd)."
        ) from None
