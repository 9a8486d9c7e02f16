"""What a config says of models, tried on this machine before anything is started.

``serve`` and ``config check`` ask the same: what the one takes the other starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from llamasup.config.issues import ConfigIssues, Issue, Place, issue_at, place_text
from llamasup.config.values import Config, ModelEntry
from llamasup.errors import ConfigInvalid, LlamasupError, UsageInvalid
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.flags import read_extra
from llamasup.models.spec import ModelSpec
from llamasup.pool.eviction import devices
from llamasup.pool.model import SizedModel, estimate_model
from llamasup.pool.options import PoolOptions

__all__ = ["WrongModel", "refusal", "wrong_flags", "wrong_models"]

_OWN_CODES = {65, 66, 69, 71}  # of a model or of the machine, not of how the config is written
_OPTION = re.compile(r"--([a-z][a-z-]*)")


@dataclass(frozen=True, slots=True)
class WrongModel:
    """A model that cannot be loaded as the config says. ``where``: FILE:LINE; "": a program says it."""

    place: Place
    where: str
    error: LlamasupError

    @property
    def details(self) -> tuple[str, ...]:
        """What belongs to the error's message, and what to do."""
        remedy = (f"→ {self.error.remedy}",) if self.error.remedy else ()
        return (*self.error.details, *self.error.lines, *remedy)


def wrong_models(config: Config, specs: Iterable[ModelSpec], options: PoolOptions) -> Iterator[WrongModel]:
    """Blocks for some milliseconds for each of ``specs``. What the config does not name is not tried, nor
    what is not here: it may come.
    """
    pinned: list[SizedModel] = []
    for spec in specs:
        said = {name: config.models[name] for name in spec.names if name in config.models}
        if not said or not spec.source or spec.is_remote:
            continue
        try:
            sized = estimate_model(spec, options.budget, options.runtime, options.environ)
            _refuse_devices(sized)
            _refuse_crowded(sized, pinned)
        except LlamasupError as error:
            name, key = _place_of(said, error)
            place = ("models", name, *key)
            yield WrongModel(place, _where(place, said[name].where, config), error)


def wrong_flags(config: Config, capabilities: Capabilities, *, file: str) -> Iterator[WrongModel]:
    """Every ``extra`` with a flag that no start accepts, also in ``defaults``, in rules and in models to
    download.

    ``file``: of the config; empty if the config comes from a program.
    """
    given: list[tuple[Place, tuple[str, ...] | None, str]]
    given = [(("defaults", "extra"), config.defaults.extra, f"{file}:0")]
    given += [(("models", name, "extra"), entry.extra, entry.where) for name, entry in config.models.items()]
    for place, extra, where in given:
        try:
            read_extra(capabilities, extra or ())
        except UsageInvalid as error:
            yield WrongModel(place, _where(place, where, config), error)


def _where(place: Place, where: str, config: Config) -> str:
    """FILE:LINE of the key at ``place``, which is in the file of ``where``; "": a program says it."""
    file = where.rpartition(":")[0]
    return f"{file}:{issue_at(place, '', config.lines).line}" if file else ""


def refusal(wrong: Iterable[WrongModel]) -> LlamasupError | None:
    """All of it, by the lines of the config; of what a program says the first as it is. None: all is well.

    Its exit code says whose turn it is: 65, 66, 69 or 71 where that is the same for all, else 78.
    """
    issues: list[Issue] = []
    codes: set[int] = set()
    file = ""
    for each in wrong:
        file, _, line = each.where.rpartition(":")
        if not file:
            return each.error
        issues.append(Issue(int(line), place_text(each.place), each.error.message, each.details))
        codes.add(each.error.exit_code)
    if not issues:
        return None
    error = ConfigIssues(file, tuple(issues))
    if len(codes) == 1 and codes <= _OWN_CODES:
        (error.exit_code,) = codes
    return error


def _refuse_devices(sized: SizedModel) -> None:
    """llama-server ends at a device that it does not know."""
    there = [device.name for device in sized.launch.runtime.capabilities.devices]
    absent = [each for each in sized.spec.options.devices or () if each not in ("none", *there)]
    if absent:
        raise ConfigInvalid(
            f"--device {absent[0]!r} is not there; the runtime has {', '.join(there) or 'no device'}",
            remedy="llamasup doctor shows the devices of the runtime.",
        )


def _refuse_crowded(sized: SizedModel, pinned: list[SizedModel]) -> None:
    """Of a group at most one is on a device, and what is pinned makes way for nobody."""
    stay = sized.spec.stay
    if not stay.pin:
        return
    for other in pinned:
        groups = sorted(stay.groups & other.spec.stay.groups)
        if groups and not set(devices(sized.needs)).isdisjoint(devices(other.needs)):
            raise ConfigInvalid(
                f"it is pinned, and so is {other.spec.id!r} of the group {groups[0]!r}, of which at most one "
                "is on a device: it could never be loaded",
                remedy="Pin one of them, or take one out of the group.",
            )
    pinned.append(sized)


def _place_of(said: Mapping[str, ModelEntry], error: LlamasupError) -> tuple[str, tuple[str, ...]]:
    """Which of those that share its process says it, and under which key: errors of options name the flag.
    What rules or defaults say stands under no key of the model.
    """
    for name, entry in said.items():
        for flag in _OPTION.finditer(error.message):
            if any(word.partition("=")[0] == flag[0] for word in entry.extra or ()):
                return name, ("extra",)
        if (option := _OPTION.match(error.message)) is not None:
            key = "devices" if option[1] == "device" else option[1].replace("-", "_")
            if getattr(entry, key, None) is not None:
                return name, (key,)
        if entry.path is not None and error.message.startswith(entry.path):
            return name, ("path",)
    return next(iter(said)), ()
