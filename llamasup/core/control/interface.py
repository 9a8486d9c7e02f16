"""The interfaces between the control application and the service that it controls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import asdict

from llamasup.core.hub.remote_file import Listener
from llamasup.core.models.spec import Changes
from llamasup.errors import ConfigInvalid, Stopping

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from llamasup.core.http.address import Address
    from llamasup.core.observability.counters import HeldSlots, InstanceGauges, Metrics, NodeGauges
    from llamasup.core.observability.observer import Observer
    from llamasup.core.supervision.events import Bus

UsageReport = Callable[[str, str | None], Awaitable[Mapping[str, Any]]]
"""The ``usage`` object (docs/design.md) for ``by`` and ``since``. Raises UsageInvalid."""


Fetch = Callable[[Listener], Coroutine[Any, Any, None]]
"""Downloads a model. Raises the errors of ``Downloads.fetch``. If it is cancelled, the next one continues."""


def shown(changes: Changes) -> Mapping[str, Any]:
    """The changes of a reload as JSON (docs/control.md)."""
    return {name: list(ids) for name, ids in asdict(changes).items()}


class Host(Protocol):
    """A service before its start, as features see it that attach observers."""

    usage: UsageReport
    """The report of the usage. The feature that counts the usage sets it."""

    @property
    def environ(self) -> Mapping[str, str]: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """The values of keys of features that the config sets."""
        ...

    @property
    def counts_usage(self) -> bool:
        """Whether the command line allows to count the usage."""
        ...

    def observe(self, *observers: Observer) -> None:
        """Call these observers from now on, after the earlier ones."""
        ...

    def held_slots(self) -> Sequence[HeldSlots]:
        """The slots that the requests in flight use."""
        ...


class BatchWorker(Protocol):
    """Sends requests of its own through a listener of the proxy."""

    async def run(self, address: Address) -> None:
        """Work until cancelled, over this address of the proxy."""
        ...

    def stop(self) -> None:
        """End the run at once: llamasup stops."""
        ...


class ServiceOwner(Protocol):
    """The service around the models. It is notified of control requests before they are carried out."""

    @property
    def stops_asked(self) -> int: ...

    def ask_stop(self) -> None:
        """Stop gracefully; on the second call at once."""
        ...

    def control_asks(self, what: str, model: str = "") -> None:
        """``what``: ``load``, ``unload``, ``restart``, ``reload``, ``pull``, ``rm``, ``upgrade`` or
        ``stop``.
        """
        ...


def shut_down(owner: ServiceOwner, *, now: bool) -> None:
    """Implements ``ControlTarget.shutdown``."""
    if owner.stops_asked and not now:
        return
    owner.control_asks("stop")
    if now and not owner.stops_asked:
        owner.ask_stop()  # a second call means at once
    owner.ask_stop()


def refuse_if_stopping(owner: ServiceOwner) -> None:
    if owner.stops_asked:
        raise Stopping("llamasup is stopping.", remedy="Start it again.")


class ControlTarget(Protocol):
    """All methods are for the event loop's thread. ``model`` may be any of its names; an unknown one raises
    ModelUnknown, with similar names in the remedy.
    """

    @property
    def bus(self) -> Bus: ...

    def status(self) -> Mapping[str, Any]:
        """The ``status`` object of the contract (docs/design.md)."""
        ...

    def why(self, model: str) -> Mapping[str, Any]:
        """Why the model is in its state, in sentences (docs/control.md)."""
        ...

    def listed(self, model: str) -> Mapping[str, Any]:
        """A model of this node as ``/v1/models`` lists it."""
        ...

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The last decisions about all models, the newest first."""
        ...

    def gauges(self) -> Sequence[InstanceGauges]: ...

    def node_gauges(self) -> NodeGauges | None:
        """Return the gauges of the other nodes; None if there are none."""
        ...

    async def scrape(self) -> Mapping[str, str]:
        """The Prometheus text of every serving child, by model."""
        ...

    async def load(self, model: str) -> None:
        """Returns when the model serves. Raises ModelUnknown, DoesNotFit, ServerFailed, …."""
        ...

    async def unload(self, model: str) -> None:
        """Returns when its memory is free. Requests in flight are drained first."""
        ...

    async def restart(self, model: str) -> None:
        """Returns when the model serves again. New requests wait until then."""
        ...

    def pull(self, model: str) -> Fetch:
        """The download of a model, unless it is here. ``model`` may also name a repository, if the config
        allows downloads on demand. Raises ModelUnknown, ModelInvalid, NotAllowed, UsageInvalid and Conflict.
        """
        ...

    async def remove(self, model: str) -> Mapping[str, Any]:
        """Remove the files of a model that is not loaded. Returns the paths and the freed bytes.

        Raises Conflict if it is in use or cannot be removed here, and FolderUnusable.
        """
        ...

    def upgrade_status(self) -> Mapping[str, Any]:
        """The last upgrade, or the one under way (docs/upgrade.md)."""
        ...

    async def upgrade(self, runtime: str, *, dry_run: bool = False) -> Mapping[str, Any]:
        """Serve all models with this build of llama.cpp, once it has proven itself. Raises BuildRefused."""
        ...

    async def reload(self) -> Mapping[str, Any]:
        """Read the configuration again. Returns the changes: ids of models (docs/control.md).

        Raises ConfigInvalid, and then changes nothing.
        """
        ...

    def shutdown(self, *, now: bool = False) -> None:
        """Like SIGTERM; ``now``: like a second one. Further calls without ``now`` do nothing."""
        ...

    async def memory(self) -> Mapping[str, Any]:
        """The ``memory`` object of the control API (docs/control.md)."""
        ...

    @property
    def config(self) -> ConfigAccess | None:
        """The config file; None if no file alone makes the config."""
        ...

    def held_bytes(self) -> int:
        """The memory that the plans of all processes predict, on all devices together."""
        ...

    async def plan(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """The ``plan`` object of the control API: the plan of a served model with ``settings`` (keys of a
        config) in place of its own. Starts nothing. Raises UsageInvalid for wrong settings.
        """
        ...

    def log_path(self, model: str) -> Path | None:
        """The log file of the model's llama-server, if there is one."""
        ...


class ConfigMistakes(ConfigInvalid):
    """The text of a config is invalid. ``mistakes`` as in ``config check --json``."""

    http_status = 400
    _what = "mistake"
    _remedy = "Correct the lines."

    def __init__(self, file: str, mistakes: Sequence[Mapping[str, Any]]) -> None:
        count = f"1 {self._what}" if len(mistakes) == 1 else f"{len(mistakes)} {self._what}s"
        super().__init__(f"The text has {count}; {file} is unchanged.", remedy=self._remedy)
        self.mistakes = mistakes


class ConfigRefused(ConfigMistakes):
    """The text makes changes that only the user of the machine may make."""

    http_status = 403
    cause = "config_refused"
    _what = "refused change"
    _remedy = "Change these values in the file itself, on its machine."


class ConfigAccess(Protocol):
    """The config file of ``serve`` (docs/control.md). ``trusted``: the request came over the private socket,
    and so from the user of the machine.
    """

    async def show(self) -> Mapping[str, Any]:
        """Raises ConfigInvalid if the file cannot be read."""
        ...

    async def check(self, text: str, *, trusted: bool) -> Mapping[str, Any]:
        """The mistakes of ``text``, and what a reload with it would change."""
        ...

    async def replace(self, text: str, version: str, *, trusted: bool) -> Mapping[str, Any]:
        """Write ``text``, reload, and return the changes. ``version``: of the text that it replaces.

        Raises Conflict, ConfigMistakes, ConfigRefused and FolderUnusable.
        """
        ...


class ExplainedModels(Protocol):
    """The models of a catalog. Virtual models and models of other nodes are not in the pool."""

    def why(self, name: str) -> Mapping[str, Any]:
        """The answer of ``ControlTarget.why``."""
        ...

    def refuse(self, what: str, name: str) -> None:
        """Raises Conflict if only another process could do this (``ServiceOwner.control_asks``)."""
        ...


class Nodes(Protocol):
    """The other nodes."""

    def status(self) -> Sequence[Mapping[str, Any]]:
        """The ``nodes`` of the status object (docs/design.md)."""
        ...

    def gauges(self) -> NodeGauges: ...


class Upgrades(Protocol):
    """Moves all models to another build of llama.cpp (docs/upgrade.md)."""

    def status(self) -> Mapping[str, Any]: ...

    async def preview(self, choice: str) -> Mapping[str, Any]: ...

    async def upgrade(self, choice: str) -> Mapping[str, Any]:
        """Raises BuildRefused."""
        ...


class ConsolePages(Protocol):
    """The web console, as a part of the control application."""

    @property
    def routes(self) -> Sequence[BaseRoute]: ...

    def is_open_for(self, request: Request) -> Callable[[], bool]:
        """Whether a stream of this request may continue: its key or its session can end before it."""
        ...


MakeRoutes = Callable[[], Sequence["BaseRoute"]]
"""Called in a thread, when the control application is loaded."""
MakeConsole = Callable[[Callable[[], None]], ConsolePages | None]
"""Called in a thread, when the control application is loaded. The console calls its argument when a session
or a key has ended, so that the streams ask ``is_open_for``.
"""
