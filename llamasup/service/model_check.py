"""Checks the models of a config on this machine before any process is started.

``serve`` and ``config check`` use the same checks: ``serve`` starts what ``config check`` accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import ConfigIssues, Issue, issue_at, place_text
from llamasup.core.llama_server.argv_builder import read_extra
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.cheapest_set import devices
from llamasup.core.pool.estimate import SizedModel, estimate_model
from llamasup.core.pool.options import PoolOptions
from llamasup.core.settings.declaration import Place
from llamasup.core.settings.model import ModelEntry
from llamasup.errors import ConfigInvalid, LlamasupError, UsageInvalid

_OWN_CODES = {65, 66, 69, 71}  # problems of a model or of the machine, not of the config
_OPTION = re.compile(r"--([a-z][a-z-]*)")


class RejectedModel(Struct, frozen=True):
    """A model that cannot be loaded as configured. ``where``: FILE:LINE; "" if a program configured it."""

    place: Place
    where: str
    error: LlamasupError

    @property
    def details(self) -> tuple[str, ...]:
        """The details and the remedy of the error."""
        remedy = (f"→ {self.error.remedy}",) if self.error.remedy else ()
        return (*self.error.details, *self.error.lines, *remedy)


def rejected_models(
    config: Config, specs: Iterable[ModelSpec], options: PoolOptions
) -> Iterator[RejectedModel]:
    """Blocks for some milliseconds per model. Skips models that the config does not name, and models without
    a local file, which may appear later.
    """
    pinned: list[SizedModel] = []
    for spec in specs:
        entries = {name: config.models[name] for name in spec.names if name in config.models}
        if not entries or not spec.source or spec.is_remote:
            continue
        try:
            sized = estimate_model(spec, options.budget, options.runtime, options.environ)
            _check_devices(sized)
            _check_pinned_groups(sized, pinned)
        except LlamasupError as error:
            name, key = _key_of(entries, error)
            place = ("models", name, *key)
            yield RejectedModel(place, _where(place, entries[name].where, config), error)


def rejected_flags(config: Config, capabilities: Capabilities, *, file: str) -> Iterator[RejectedModel]:
    """Every ``extra`` with an unknown flag, also in ``defaults``, in rules and in models to download.

    ``file``: of the config; empty if the config comes from a program.
    """
    extras: list[tuple[Place, tuple[str, ...] | None, str]]
    extras = [(("defaults", "extra"), config.defaults.extra, f"{file}:0")]
    extras += [(("models", name, "extra"), entry.extra, entry.where) for name, entry in config.models.items()]
    for place, extra, where in extras:
        try:
            read_extra(capabilities, extra or ())
        except UsageInvalid as error:
            yield RejectedModel(place, _where(place, where, config), error)


def _where(place: Place, where: str, config: Config) -> str:
    """FILE:LINE of the key at ``place``, in the file of ``where``; "" if a program configured it."""
    file = where.rpartition(":")[0]
    return f"{file}:{issue_at(place, '', config.lines).line}" if file else ""


def rejection(rejected: Iterable[RejectedModel]) -> LlamasupError | None:
    """One error for all rejected models, with lines of the config; for a program's config the first error.

    The exit code is 65, 66, 69 or 71 if all models have the same, else 78. None if no model is rejected.
    """
    issues: list[Issue] = []
    codes: set[int] = set()
    file = ""
    for model in rejected:
        file, _, line = model.where.rpartition(":")
        if not file:
            return model.error
        issues.append(Issue(int(line), place_text(model.place), model.error.message, model.details))
        codes.add(model.error.exit_code)
    if not issues:
        return None
    error = ConfigIssues(file, tuple(issues))
    if len(codes) == 1 and codes <= _OWN_CODES:
        (error.exit_code,) = codes
    return error


def _check_devices(sized: SizedModel) -> None:
    """llama-server exits if it does not know a device."""
    assert sized.launch is not None  # it is of a file
    known = [device.name for device in sized.launch.runtime.capabilities.devices]
    unknown = [name for name in sized.spec.options.devices or () if name not in ("none", *known)]
    if unknown:
        raise ConfigInvalid(
            f"--device {unknown[0]!r} does not exist; the runtime has {', '.join(known) or 'no device'}",
            remedy="llamasup doctor shows the devices of the runtime.",
        )


def _check_pinned_groups(sized: SizedModel, pinned: list[SizedModel]) -> None:
    """Only one model of a group can be on a device, and a pinned model is never evicted."""
    stay = sized.spec.stay
    if not stay.pin:
        return
    for other in pinned:
        groups = sorted(stay.groups & other.spec.stay.groups)
        if groups and not set(devices(sized.needs)).isdisjoint(devices(other.needs)):
            raise ConfigInvalid(
                f"it is pinned, and so is {other.spec.id!r}; both are in group {groups[0]!r}, which allows "
                "one model per device, so it could never be loaded",
                remedy="Pin only one of them, or remove one from the group.",
            )
    pinned.append(sized)


def _key_of(entries: Mapping[str, ModelEntry], error: LlamasupError) -> tuple[str, tuple[str, ...]]:
    """The model and key of the config that caused ``error``, whose message names the flag of an option. The
    key is empty for settings of rules and defaults.
    """
    for name, entry in entries.items():
        for flag in _OPTION.finditer(error.message):
            if any(argument.partition("=")[0] == flag[0] for argument in entry.extra or ()):
                return name, ("extra",)
        if (option := _OPTION.match(error.message)) is not None:
            key = "devices" if option[1] == "device" else option[1].replace("-", "_")
            if getattr(entry, key, None) is not None:
                return name, (key,)
        if entry.path is not None and error.message.startswith(entry.path):
            return name, ("path",)
    return next(iter(entries)), ()
