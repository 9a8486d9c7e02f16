"""The models of other nodes in the control API: they are explained, and changed on their own node
(an ``OtherModels``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamasup.errors import Conflict
from llamasup.features.peers.peers import Peers


class PeerModels:
    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def why(self, model: str, why_of: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        remote = self._peers.find(model)
        if remote is None:
            return None
        return self._peers.why(remote, why_of(model) if remote.group.is_local else None)

    def refuse(self, what: str, model: str) -> None:
        if (remote := self._peers.find(model)) and not remote.group.is_local:
            names = " and ".join(f"{name!r}" for name in remote.group.nodes)
            raise Conflict(
                f"The model {model!r} is not on this node, but on {names or 'no node yet'}.",
                remedy=f"Run `llamasup {what} {model} --url URL` with the URL of that node."
                if what in ("load", "unload", "restart")
                else f"Run `llamasup {what}` on the machine of that node.",
            )
