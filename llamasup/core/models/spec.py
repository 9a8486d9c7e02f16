"""The spec of one model among many, which the registry makes of its settings, and what differs between the
specs of two registries (pure).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from msgspec import Struct, field, structs

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.models.redaction import redact_paths
from llamasup.core.planning.projectors import Pairing
from llamasup.core.settings.model import Engine, ModelSettings, Settings


class Stay(Struct, frozen=True):
    """The rules for how long a model stays loaded.

    ``pin``: it is never evicted for another model. ``groups``: at most one model of a group is on a device.
    ``by_command``: it is the only model of ``run`` and ``wrap``, and shares no memory. Only commands load and
    unload it, and its server answers for itself: requests learn its state, and after a crash loop it tries
    again by itself.
    """

    ttl_s: float = float("inf")
    pin: bool = False
    preload: bool = False
    groups: frozenset[str] = frozenset()
    by_command: bool = False


KeepResult = Literal["kept", "in_use", "fixed"]
"""The result of a request to keep a model loaded for a time.

``in_use``: other requests use the model, so it is not unloaded. ``fixed``: no request decides, because the
model is pinned, or is the only model.
"""


class ModelSpec(Struct, frozen=True):
    """One model that can be served. A reload that makes an equal spec does not touch its processes.

    ``source``: an absolute path, or ``org/repo:quant`` or a URL to download. ``identity``: the states of its
    files, the model's own first; a replaced file makes a changed model. ``pairing``: the projector next to
    it, unless one is configured. ``settings.alias`` is its id. ``listed``: the facts of the file; None: it is
    missing or broken (see ``problem``). ``unlisted``: no list of models for clients has it, because it is a
    broken file that the config does not name. ``shares``: the names of the config, if there are several.

    ``engine``: the program that serves it in place of a llama-server; then it has no file, and no build.

    ``runtime``: the build that starts it, which the pool sets (empty: the one that is found). ``unproven``:
    its processes get no requests before the build has proven itself with them (pool/upgrade/).
    """

    id: str
    source: str
    aliases: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    options: ModelSettings = field(default_factory=ModelSettings)
    stay: Stay = field(default_factory=Stay)
    replicas: int = 1
    identity: tuple[tuple[str, int, int], ...] = ()
    listed: ModelFacts | None = None
    pairing: Pairing | None = None
    problem: str = ""
    remedy: str = ""
    unlisted: bool = False
    shares: tuple[str, ...] = ()
    engine: Engine | None = None
    runtime: str = ""
    unproven: bool = False

    @property
    def is_remote(self) -> bool:
        """Whether it has to be downloaded first."""
        return bool(self.source) and not os.path.isabs(self.source)  # noqa: PTH117 - read often

    @property
    def projector(self) -> str | None:
        """The path of its projector, if one was found next to it."""
        return None if self.pairing is None or self.pairing.projector is None else self.pairing.projector.path

    @property
    def started_as(self) -> tuple[object, ...]:
        """The parts that decide how its processes start. Its names do not: a rename restarts no process."""
        options = self.options
        own = (options.devices, options.loras, options.warm_up, options.keep_slots)
        settings = structs.replace(self.settings, alias=None)
        return (self.source, settings, self.replicas, self.identity, self.engine, *own)

    def keeps_processes_of(self, before: ModelSpec) -> bool:
        """Whether it starts as ``before`` did. A file that can be read again starts anew."""
        return self.started_as == before.started_as and bool(self.problem or not before.problem)

    def is_file_of(self, other: ModelSpec) -> bool:
        """Whether both have the same file, whatever its content is now."""
        if self.identity and other.identity:
            return self.identity[0][0] == other.identity[0][0]
        return bool(self.source) and self.source == other.source

    def redacted(self, text: str) -> str:
        """Replace paths in ``text`` by file names, for clients.

        Returns an empty text if paths could remain.
        """
        source = (self.source,) if os.path.isabs(self.source) else ()  # noqa: PTH117
        return redact_paths(text, (*source, *(path for path, _, _ in self.identity), *self.options.files))

    def public_problem(self, problem: str) -> str:
        """The reason why it cannot be loaded, for clients."""
        return self.redacted(problem) or f"The model {self.id!r} cannot be loaded: llamasup's log says why"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases)


_NONE: Mapping[str, ModelSpec] = MappingProxyType({})


class Changes(Struct, frozen=True):
    """The ids of the models that differ.

    ``changed`` models need new processes; ``retouched`` ones keep theirs.

    ``renamed``: (removed id, id of the model that has its names now). ``settings``: other config keys that
    changed and take effect now. ``next_start``: config keys that changed and take effect at the next start.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    retouched: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    next_start: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def new(self) -> tuple[str, ...]:
        """The added models without the new ids of renamed ones."""
        successors = {new for _, new in self.renamed}
        return tuple(id_ for id_ in self.added if id_ not in successors)

    @property
    def gone(self) -> tuple[str, ...]:
        """The removed models without the old ids of renamed ones."""
        renamed = {old for old, _ in self.renamed}
        return tuple(id_ for id_ in self.removed if id_ not in renamed)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.retouched)


Resolve = Callable[[str], ModelSpec | None]


def _nothing(_name: str) -> None:
    return None


def changes(
    before: Mapping[str, ModelSpec],
    after: Mapping[str, ModelSpec],
    *,
    running: Mapping[str, ModelSpec] = _NONE,
    resolve: Resolve = _nothing,
) -> Changes:
    """Compare two registries.

    ``running`` are the specs of the models that hold memory, with their downloaded files. ``resolve`` finds
    the spec of a name afterwards. If several models become one, running ones come first in ``renamed``.
    """

    def is_same(id_: str) -> bool:
        earlier = (before[id_], *([running[id_]] if id_ in running else []))
        return any(map(after[id_].keeps_processes_of, earlier))

    both = [id_ for id_ in after if id_ in before]
    same = {id_ for id_ in both if is_same(id_)}
    removed = tuple(id_ for id_ in before if id_ not in after)
    gone = sorted(removed, key=lambda id_: id_ not in running)
    successors = ((id_, _successor(running.get(id_, before[id_]), resolve)) for id_ in gone)
    return Changes(
        added=tuple(id_ for id_ in after if id_ not in before),
        removed=removed,
        changed=tuple(id_ for id_ in both if id_ not in same),
        retouched=tuple(id_ for id_ in both if id_ in same and before[id_] != after[id_]),
        unchanged=tuple(id_ for id_ in both if before[id_] == after[id_]),
        renamed=tuple((id_, successor.id) for id_, successor in successors if successor is not None),
    )


def _successor(gone: ModelSpec, resolve: Resolve) -> ModelSpec | None:
    """Find the model that now has the id, else the first model with an alias of it and the same file."""
    by_name = map(resolve, gone.names)
    found = next(by_name)
    if found is not None:
        return found
    return next((spec for spec in by_name if spec is not None and gone.is_file_of(spec)), None)
