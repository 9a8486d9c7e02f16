"""A model as a client of a running llamasup reaches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.errors import UsageInvalid

_MAX_LISTED = 10


class ModelNotServed(UsageInvalid):
    """The chosen llamasup serves no model of this name."""


class ServedModel(Struct, frozen=True):
    """A model as a client reaches it. ``url`` has no path. ``context``: tokens of one request, if known."""

    url: str
    name: str
    context: int | None
    others: Sequence[str] = ()
    """The names of the other models at ``url``."""


def served_model(
    url: str, name: str | None, key: str | None, *, loaded: Sequence[str] = (), option: str = ""
) -> ServedModel:
    """Return the model ``name``, or the only one, or the only one of ``loaded``, at ``url``.

    ``key`` is that of the client. ``option`` is the one that chooses a model, for the remedy. Raises
    ModelNotServed, UsageInvalid if no model is named and several are served, and what ``ControlClient``
    raises.
    """
    url = url.rstrip("/").removesuffix("/v1")
    with ControlClient(ControlAddress(url=url, api_key=key or None)) as server:
        entries = {str(entry["id"]): entry for entry in server.models()}
    if name is None:
        name = _only(list(entries)) or _only([id_ for id_ in loaded if id_ in entries])
        if name is None:
            choice = f"Choose one with {option}" if option else "Choose one"
            raise UsageInvalid(
                f"{len(entries)} models are served at {url}.", remedy=f"{choice}: {_listed(list(entries))}."
            )
    by_alias = {str(alias): entry for entry in entries.values() for alias in entry.get("aliases") or ()}
    entry = entries.get(name) or by_alias.get(name)
    if entry is None:
        raise ModelNotServed(
            f"The model {name!r} is not served at {url}.", remedy=f"Choose one of {_listed(list(entries))}."
        )
    return ServedModel(url, name, _context(entry), tuple(id_ for id_ in entries if id_ != name))


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _context(entry: Mapping[str, Any]) -> int | None:
    own, meta = entry.get("llamasup") or {}, entry.get("meta") or {}
    found = own.get("context") or meta.get("n_ctx") or meta.get("n_ctx_train")
    return found if isinstance(found, int) else None


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
