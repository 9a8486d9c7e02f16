"""The spec of one model among many, which the registry makes of its settings."""

from __future__ import annotations

import os
from typing import Literal

from msgspec import Struct, field, structs

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.models.redaction import redact_paths
from llamasup.core.planning.projectors import Pairing
from llamasup.core.settings.model import ModelSettings, Settings


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
        return (self.source, settings, self.replicas, self.identity, *own)

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
