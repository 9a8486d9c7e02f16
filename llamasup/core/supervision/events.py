"""The public events of llamasup, and the bus that delivers them.

The JSON shapes are the public contract (docs/design.md, Events); fields may be added, never renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from llamasup.core.http.address import Address, TcpAddress
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import Adjustment
from llamasup.core.models.spec import Changes
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.states import State
from llamasup.core.system.process.child import Exit
from llamasup.errors import GaveUp, LlamasupError, ServerFailed

PROTOCOL = 1


class StateChanged(Struct, frozen=True):
    model: str
    state: State
    generation: int


class ServerExited(Struct, frozen=True):
    """A child ended unexpectedly. ``exit`` is None if llamasup killed it (it hung, or gave no token)."""

    model: str
    generation: int
    exit: Exit | None
    diagnosis: Diagnosis
    restart_in_s: float | None


class ServerWarned(Struct, frozen=True):
    """A child serves, but not everything works as configured."""

    model: str
    generation: int
    message: str
    remedy: str


class LoadProgressed(Struct, frozen=True):
    """The progress of a model's load, published about twice a second."""

    model: str
    generation: int
    progress: LoadProgress


class ModelUnloading(Struct, frozen=True):
    """A model is unloaded. ``reason``: ``memory``, ``group`` or ``count`` (for ``for_model``), ``ttl``,
    ``asked``, ``changed``, ``removed``.
    """

    model: str
    reason: str
    for_model: str = ""


class LoadFailed(Struct, frozen=True):
    """A model cannot be started, or with ``model`` None llamasup itself."""

    model: str | None
    error: LlamasupError

    @property
    def follows_exit(self) -> bool:
        """Whether a ``ServerExited`` with the same diagnosis came before."""
        return isinstance(self.error, (ServerFailed, GaveUp))


class Downloading(Struct, frozen=True):
    """The progress of a model's download, published some times a second. ``total_bytes`` None: unknown."""

    model: str
    done_bytes: int
    total_bytes: int | None
    bytes_per_s: int


class ModelsChanged(Struct, frozen=True):
    """A reload or a change in the folders changed the served models, which now are ``models``."""

    changes: Changes
    models: tuple[str, ...]


class ConfigRejected(Struct, frozen=True):
    """A reload found an invalid config; the previous one stays in effect."""

    error: LlamasupError


class Ready(Struct, frozen=True):
    """Every model that was to be loaded at the start serves requests. ``ollama``: the address of Ollama's
    API, if it is served.
    """

    address: Address
    pid: int
    models: tuple[str, ...]
    ollama: Address | None = None


class Stopped(Struct, frozen=True):
    pass


PublishedEvent = (
    StateChanged
    | ServerExited
    | ServerWarned
    | ModelUnloading
    | LoadFailed
    | LoadProgressed
    | Downloading
    | ModelsChanged
    | ConfigRejected
    | Ready
    | Stopped
)


def as_json(event: PublishedEvent) -> Mapping[str, Any]:
    """The public JSON object of an event."""
    match event:
        case StateChanged(model, state, generation):
            return as_object("state", model=model, state=state.value, generation=generation)
        case ServerExited(model, generation, exit_, diagnosis, restart_in_s):
            return as_object(
                "exit",
                model=model,
                code=exit_.code if exit_ else None,
                signal=exit_.signal if exit_ else None,
                cause=diagnosis.cause,
                message=diagnosis.message,
                remedy=diagnosis.remedy,
                restart_in_s=restart_in_s,
                generation=generation,
                **({} if diagnosis.adjustment is None else {"adjustment": _adjustment(diagnosis.adjustment)}),
            )
        case ServerWarned(model, generation, message, remedy):
            return as_object("warning", model=model, generation=generation, message=message, remedy=remedy)
        case LoadProgressed(model, generation, progress):
            return as_object("progress", model=model, generation=generation, **progress.as_json())
        case ModelUnloading(model, reason, for_model):
            return as_object(
                "unload", model=model, reason=reason, **({"for": for_model} if for_model else {})
            )
        case LoadFailed(model, error):
            return as_object(
                "failed",
                model=model,
                cause=error.cause,
                message=error.message,
                remedy=error.remedy,
                exit_code=error.exit_code,
                **({"details": list(error.details)} if error.details else {}),
            )
        case Downloading(model, done, total, speed):
            return as_object("download", model=model, done_bytes=done, total_bytes=total, bytes_per_s=speed)
        case ModelsChanged(changes, _):
            return as_object("models", **{name: list(ids) for name, ids in asdict(changes).items()})
        case ConfigRejected(error):
            details = list(error.details)
            return as_object("config", ok=False, message=error.message, remedy=error.remedy, details=details)
        case Ready(address, pid, models, ollama):
            more = {} if ollama is None else {"ollama": ollama.url}
            return as_object(
                "ready", url=address.url, **_host_and_port(address), pid=pid, models=list(models), **more
            )
        case Stopped():  # pragma: no branch - the last kind
            return as_object("stopped")


def _host_and_port(address: Address) -> Mapping[str, Any]:
    """The host of a Unix socket is its path, as in llama-server's options; it has no port."""
    if isinstance(address, TcpAddress):
        return {"host": address.host, "port": address.port}
    return {"host": address.path, "port": None}


def _adjustment(adjustment: Adjustment) -> Mapping[str, Any]:
    changes = [asdict(change) for change in adjustment.changes]
    return {"step": adjustment.step, "most_steps": adjustment.most_steps, "changes": changes}


def as_object(event: str, **fields: Any) -> Mapping[str, Any]:
    """The JSON object of an event with these fields."""
    return {"event": event, "protocol": PROTOCOL, **fields}


class Bus:
    """Calls every listener with every event, in order and at once."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[PublishedEvent], None]] = []

    def listen(self, listener: Callable[[PublishedEvent], None]) -> None:
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[PublishedEvent], None]) -> None:
        self._listeners.remove(listener)

    def publish(self, event: PublishedEvent) -> None:
        for listener in tuple(self._listeners):  # a listener may subscribe or unsubscribe here
            listener(event)
