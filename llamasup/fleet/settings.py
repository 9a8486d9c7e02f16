"""The section ``fleet`` of a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from msgspec.structs import replace

from llamasup.core.config.config_keys import Config, Memory, RuntimeChoice, Slots
from llamasup.core.config.issues import shown
from llamasup.core.http.address import host_of_url
from llamasup.core.settings.declaration import ConfigKey, Place, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import (
    Boolean,
    Endpoint,
    FilePath,
    Integer,
    Named,
    OneOf,
    Section,
    SizeText,
    Text,
    Time,
)
from llamasup.core.settings.model import ModelSettings
from llamasup.core.settings.units import Size

WhenIdle = Literal["end", "sleep"]


class FleetModel(SettingGroup, frozen=True, kw_only=True):
    """The settings of one model that differ from the settings of all models."""

    min_replicas: int | None = setting(Integer(0, 10_000), "The least number of replicas.", "that of fleet")
    max_replicas: int | None = setting(Integer(1, 10_000), "The largest number of replicas.", "that of fleet")
    cpus: int | None = setting(Integer(0, 4096), "The CPUs for a replica.", "from the plan")
    gpus: int | None = setting(Integer(0, 64), "The GPUs for a replica.", "that of fleet")
    memory: Size | None = setting(SizeText(percent=False), "The main memory for a replica.", "from the plan")
    when_idle: WhenIdle | None = setting(
        OneOf(get_args(WhenIdle)), "What its idle replicas do.", "that of fleet"
    )


_LISTEN: Final = r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"


_FLEET_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class Fleet(SettingGroup, frozen=True, kw_only=True):
    """Models on a Ray cluster (docs/ray.md). ``llamasup serve`` with a ``directory`` is a front of the fleet,
    and loads no model itself.
    """

    name: str = setting(
        Text("up to 63 letters, digits, dots, dashes and underscores", _FLEET_NAME),
        "The name of the fleet in its Ray cluster.",
        unset="llamasup",
    )
    directory: str | None = setting(
        Endpoint("the URL of the fleet on Ray Serve, such as http://head:8000"),
        "The fleet whose nodes this llamasup sends requests to.",
        "none",
    )
    key_file: Path | None = setting(
        FilePath("the path of a file with the fleet's secret", hidden=True),
        "The secret of the fleet. `llamasup fleet deploy` writes it if it is missing.",
        "fleet.key next to the user's config",
    )
    ray: str = setting(
        Text("HOST:PORT, or auto"),
        "The head of the Ray cluster. auto: this machine's cluster.",
        names="host",
        unset="auto",
    )
    listen: str | None = setting(
        Text("HOST:PORT", _LISTEN),
        "Where Ray Serve listens on the head for the fronts, if `llamasup fleet deploy` starts it.",
        "the port of directory, on all addresses unless it is a loopback one; else 127.0.0.1:8000",
    )
    ingress: bool = setting(
        Boolean(),
        "Also serve clients without a front, at the address of Ray Serve.",
        unset=False,
    )
    min_replicas: int = setting(
        Integer(0, 10_000), "The least number of replicas of each model. 0: none without requests.", unset=0
    )
    max_replicas: int = setting(Integer(1, 10_000), "The largest number of replicas of each model.", unset=1)
    gpus: int | None = setting(
        Integer(0, 64),
        "The GPUs for a replica. Needed if the deploying machine has no GPU.",
        "from the plan",
    )
    target_load: int = setting(
        Integer(1, 100),
        "The percentage of busy slots above which replicas start.",
        unset=80,
    )
    upscale_after_s: float = setting(
        Time(), "How long the load is above the target before replicas start.", unset=5.0
    )
    downscale_after_s: float = setting(
        Time(), "How long the load is below the target before replicas stop.", unset=120.0
    )
    idle_after_s: float = setting(
        Time(), "How long a replica is idle before it stops or sleeps.", unset=600.0
    )
    when_idle: WhenIdle = setting(
        OneOf(get_args(WhenIdle)),
        "end: the last idle replica stops. sleep: idle replicas unload their model, and stop only when Ray "
        "needs the room.",
        unset="end",
    )
    drain_timeout_s: float = setting(
        Time(),
        "How long a stopping replica waits for its requests. Then they fail.",
        unset=600.0,
    )
    surge: bool = setting(
        Boolean(),
        "Start all new replicas before old ones stop. An update waits until they have free resources.",
        unset=False,
    )
    models: Mapping[str, FleetModel] = setting(
        Named(Section(FleetModel)), "Models by name, where they differ from the keys above.", "none", unset={}
    )


def is_front(config: Config) -> bool:
    """Whether it serves the models of a fleet, and none itself."""
    fleet = config.of(FLEET)
    return fleet is not None and fleet.directory is not None


def without_models(config: Config) -> Config:
    """Leave out what a front does not need: settings of the nodes, whose files may not exist here.

    ``defaults`` keeps the limits of the queue.
    """
    fleet, own = config.of(FLEET), config.defaults
    features = {name: value for name, value in config.features.items() if name != "downloads"}
    return replace(
        config,
        models={},
        groups={},
        models_dir=(),
        caches=(),
        runtime=RuntimeChoice(),
        memory=Memory(),
        slots=Slots(),
        defaults=ModelSettings(
            wait_timeout_s=own.wait_timeout_s,
            max_queued=own.max_queued,
            continue_streams=own.continue_streams,
        ),
        features=features,
    ).having(FLEET, fleet and Fleet(directory=fleet.directory, key_file=fleet.key_file))


def _of_this_machine(config: Config) -> Config:
    return without_models(config) if is_front(config) else config


def _issues(config: Config, _: bool) -> Iterator[tuple[Place, str]]:
    """Serve places one process for each replica, and a front has no models of its own."""
    fleet = config.of(FLEET)
    if fleet is None:
        return
    replicas: list[tuple[Place, int, int]] = [
        (("fleet", "min_replicas"), fleet.min_replicas, fleet.max_replicas)
    ]
    for name, own in fleet.models.items():
        if own.min_replicas is not None or own.max_replicas is not None:
            least = fleet.min_replicas if own.min_replicas is None else own.min_replicas
            most = fleet.max_replicas if own.max_replicas is None else own.max_replicas
            replicas.append((("fleet", "models", name), least, most))
    for place, least, most in replicas:
        if least > most:
            what = f"min_replicas is {least}, and max_replicas {most}"
            yield place, f"{what}; the least number must not be above the largest"
    if fleet.listen is not None and int(fleet.listen.rpartition(":")[2]) not in range(1, 65536):
        yield ("fleet", "listen"), f"invalid port in {shown(fleet.listen)}; a port is from 1 to 65535"
    for place, entry in (
        (("defaults",), config.defaults),
        *((("models", name), entry) for name, entry in config.models.items()),
    ):
        if (entry.replicas or 1) > 1:
            yield (*place, "replicas"), "has no effect in a fleet; use max_replicas of fleet"
        if entry.rpc:
            yield (*place, "rpc"), "is not possible in a fleet: each replica would need workers of its own"
    if fleet.directory is None:
        return
    if host_of_url("http://" + fleet.directory.partition("://")[2].partition("/")[0]) is None:
        yield ("fleet", "directory"), "is not a valid URL; write it like http://head:8000"
    why = "has no effect with fleet.directory, because a front serves the models of the fleet"
    for place, is_set in (
        (("peers",), bool(config.features.get("peers"))),
        (("downloads", "on_demand"), getattr(config.features.get("downloads"), "on_demand", False)),
        (("default_model",), config.default_model is not None),
    ):
        if is_set:
            yield place, f"{why}; remove it"


FLEET: Final[ConfigKey[Fleet | None]] = ConfigKey(
    "fleet",
    Setting(Section(Fleet), "Models on a Ray cluster.", "none"),
    None,
    after="slots",
    issues=_issues,
    of_this_machine=_of_this_machine,
    finds_models=(("fleet", "directory"),),
)
