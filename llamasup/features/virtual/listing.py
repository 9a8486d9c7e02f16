"""A virtual model in ``GET /v1/models`` (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamasup.core.settings.sections import VirtualEntry


def listed_virtual(
    name: str, entry: VirtualEntry, target: Mapping[str, Any] | None, problem: str = ""
) -> dict[str, Any]:
    """List a virtual model. ``target`` is the entry of the model that a request would take now, or None
    because of ``problem``.

    The text of the system prompt is not shown: it may be confidential.
    """
    shown: dict[str, Any] = {
        "object": "model",
        "created": 0,
        "owned_by": "llamasup",
        "tags": (),
        "status": {"value": "unloaded", "failed": True},
    }
    own: Mapping[str, Any] = {}
    if target is not None:
        shown |= target
        own = target.get("llamasup", {})
    virtual = {
        "model": entry.model,
        "any": list(entry.any),
        "takes": None if target is None else target["id"],
        "set": dict(entry.set),
        "default": dict(entry.default),
        "remove": list(entry.remove),
        "system": entry.system is not None,
    }
    return {
        **shown,
        "id": name,
        "aliases": (),
        "llamasup": {**own, "default": False, "problem": problem or own.get("problem"), "virtual": virtual},
    }
