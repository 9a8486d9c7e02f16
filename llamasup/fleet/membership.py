"""Makes a front of ``serve``: the models of its config are the models of the fleet, and the front loads none
itself.

``FleetMembership`` polls the directory for the nodes. Needs no Ray.

While the directory does not answer, the front keeps the nodes that it knows: requests do not pass through the
directory, so its end is no reason to refuse them. The ingress of Ray Serve is one more front.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.config.config_keys import RuntimeChoice
from llamasup.core.http.httpx_client import httpx
from llamasup.errors import UsageInvalid
from llamasup.features.peers.nodes import ExpectedModel, Peer
from llamasup.fleet.messages import POLL_PATH, POLL_S, SIGNATURE, Poll, Snapshot
from llamasup.fleet.secret import directory_key, is_signed, node_key
from llamasup.fleet.secret_file import fleet_secret
from llamasup.fleet.settings import FLEET, without_models

if TYPE_CHECKING:
    from llamasup.core.config.config_keys import Config
    from llamasup.service.serve import ServeOptions

_RETRY_S: Final = 1.0
_MAX_BYTES: Final = 32 << 20
_REPEAT_S: Final = 1.0  # a changed number of waiting requests is reported as often

_log = logging.getLogger(__name__)


def as_front(
    options: ServeOptions, environ: Mapping[str, str], *, has_own_models: bool = False
) -> ServeOptions:
    """Return ``options`` for a front of the fleet in its config. ``has_own_models``: the caller adds models
    to the config. Raises UsageInvalid for these, and ConfigInvalid without the secret of the fleet.
    """
    initial, read, adjust = options.initial_config, options.config, options.adjust
    assert initial is not None
    fleet = initial.of(FLEET)
    assert fleet is not None
    assert fleet.directory is not None
    if has_own_models:
        raise UsageInvalid(
            "A front of a fleet serves only the models of the fleet.",
            remedy="Name no other models or folders, or remove fleet.directory from the config.",
        )
    secret = fleet_secret(fleet, environ)
    return replace(
        options,
        config=lambda: without_models(read()),
        initial_config=without_models(initial),
        configured_runtime=RuntimeChoice(),
        adjust=None if adjust is None else lambda config: without_models(adjust(config)),
        membership=partial(FleetMembership, fleet.directory, secret, _models_of(initial)),
    )


def _models_of(config: Config) -> tuple[ExpectedModel, ...]:
    message = "The directory of the fleet has not answered yet"
    return tuple(
        ExpectedModel(rule.name, rule.aliases, message) for rule in config.rules if not rule.is_pattern
    )


class Known(Struct, frozen=True):
    """A front's knowledge of the fleet. ``served``: the models with a node that takes requests."""

    seen: int = 0
    peers: tuple[Peer, ...] = ()
    expected: tuple[ExpectedModel, ...] = ()
    served: frozenset[str] = frozenset()


def merged(before: Known, snapshot: Snapshot, secret: str, now_s: float) -> Known:
    """Update ``before`` by ``snapshot``. Nodes that a directory does not list yet after its start stay."""
    key = node_key(secret)
    listed = {node.name: Peer(node.name, node.url, key, snapshot.ca, node.leaving) for node in snapshot.nodes}
    peers = listed if snapshot.settled else {**{peer.name: peer for peer in before.peers}, **listed}
    expected = tuple(
        ExpectedModel(
            model.id,
            model.aliases,
            "; ".join(filter(None, ("No node of the fleet has the model yet", model.problem.rstrip(".")))),
            model.eta_s,
            now_s + model.eta_s if model.starts and model.eta_s is not None else None,
        )
        for model in snapshot.models
    )
    served = {node.model for node in snapshot.nodes if not node.leaving}
    if not snapshot.settled:
        served |= before.served
    return Known(
        snapshot.version,
        tuple(sorted(peers.values(), key=lambda peer: peer.name)),
        expected,
        frozenset(served),
    )


class FleetMembership:
    """A ``Membership``. ``run`` polls until it is cancelled. Requests may name the ``models`` of the config
    before the first poll is answered. ``ask`` reaches the directory in another way than HTTP; it raises
    ValueError if the directory does not answer.
    """

    def __init__(
        self,
        directory: str,
        secret: str,
        models: tuple[ExpectedModel, ...] = (),
        ask: Callable[[Poll], Awaitable[Snapshot]] | None = None,
    ) -> None:
        self._directory = directory.rstrip("/")
        self._other_way = ask
        self._secret = secret
        self._front = secrets.token_hex(8)
        self._known = Known(expected=models)
        self._waiting: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._number = 0
        self._changed = asyncio.Event()
        self._waiting_changed = asyncio.Event()
        self.problem = ""
        """Why the last poll failed; empty if it did not."""

    def __repr__(self) -> str:
        return f"<FleetMembership of {self._directory}: {len(self._known.peers)} nodes>"

    # --- Membership -------------------------------------------------------------------------------------

    def current(self) -> tuple[Peer, ...]:
        return self._known.peers

    async def changed(self) -> None:
        await self._changed.wait()

    def expected(self) -> tuple[ExpectedModel, ...]:
        return self._known.expected

    def wanted(self, model: str, waiting: int) -> None:
        if waiting:
            self._waiting[model] = waiting
        else:
            self._waiting.pop(model, None)
        if self._waiting != self._reported:
            self._waiting_changed.set()

    def serves(self, model: str) -> bool:
        """Tell whether a node takes requests for the model with this id."""
        return model in self._known.served

    # --- polling ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        if self._other_way is not None:
            await self._follow(self._other_way)
        async with httpx.AsyncClient(timeout=POLL_S + 10.0, trust_env=False) as client:
            await self._follow(partial(self._ask, client))

    async def _follow(self, ask: Callable[[Poll], Awaitable[Snapshot]]) -> NoReturn:
        while True:
            try:
                await self._poll(ask)
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, ValueError) as error:
                self._note_problem(f"{type(error).__name__}: {error}".rstrip(": "))
                await asyncio.sleep(_RETRY_S)
            else:
                self._note_problem("")

    async def _poll(self, ask: Callable[[Poll], Awaitable[Snapshot]]) -> None:
        """Poll once. The poll is cut short to report other waiting requests."""
        self._waiting_changed.clear()
        self._reported = dict(self._waiting)
        loop = asyncio.get_running_loop()
        self._number += 1
        nonce = secrets.token_hex(16)
        poll = Poll(self._front, nonce, self._known.seen, self._reported, self._number)
        asking = loop.create_task(_awaited(ask(poll)), name="poll")
        outdated = loop.create_task(self._report_is_outdated(loop.time()), name="outdated")
        try:
            await asyncio.wait({asking, outdated}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                self._apply(asking.result())
        finally:
            asking.cancel()
            outdated.cancel()
            await asyncio.wait({asking, outdated})  # so that a cancellation of this task passes
            if not asking.cancelled():
                asking.exception()  # marks it as retrieved

    async def _report_is_outdated(self, began_s: float) -> None:
        """Return at once for a model that requests begin to wait for, since a node must start; else after a
        while.
        """
        while self._waiting.keys() <= self._reported.keys():
            rest_s = began_s + _REPEAT_S - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(rest_s, 0.0) if self._waiting != self._reported else None):
                    await self._waiting_changed.wait()
            except TimeoutError:
                return
            self._waiting_changed.clear()

    async def _ask(self, client: httpx.AsyncClient, poll: Poll) -> Snapshot:
        headers = {
            "authorization": f"Bearer {directory_key(self._secret)}",
            "accept-encoding": "identity",
        }
        url, content = self._directory + POLL_PATH, bytearray()
        async with client.stream("POST", url, content=msgspec.json.encode(poll), headers=headers) as answer:
            if answer.status_code == 401:
                raise ValueError("the directory refuses the secret of this front (fleet.key_file)")
            if answer.status_code != 200:
                raise ValueError(f"it answers with HTTP status {answer.status_code}")
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > _MAX_BYTES:
                    raise ValueError(f"the answer has more than {_MAX_BYTES >> 20} MiB")
        if not is_signed(self._secret, poll.nonce, bytes(content), answer.headers.get(SIGNATURE, "")):
            raise ValueError("the answer is not signed with the secret of the fleet")
        return msgspec.json.decode(content, type=Snapshot)

    def _apply(self, snapshot: Snapshot) -> None:
        before, self._known = self._known, merged(self._known, snapshot, self._secret, monotonic())
        if (before.peers, before.expected) != (self._known.peers, self._known.expected):
            # All that wait now wake; the next wait is for the next change.
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _note_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.warning(
                "The directory of the fleet at %s does not answer (%s); the known nodes stay in use.",
                self._directory,
                problem,
            )
        elif self.problem and not problem:
            _log.warning("The directory of the fleet at %s answers again.", self._directory)
        self.problem = problem


async def _awaited(answer: Awaitable[Snapshot]) -> Snapshot:
    return await answer
