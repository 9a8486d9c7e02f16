"""Builds the Serve application from a config, and deploys it, shows it and ends it. Imports Ray late."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from llamasup.config import Config, load
from llamasup.config.sources import find_config
from llamasup.errors import ConfigInvalid, FleetUnusable, LlamasupError
from llamasup.fleet.certificates import missing
from llamasup.fleet.node_process import NodeSpec
from llamasup.fleet.resources import PlannedNeeds, actor_options, are_given
from llamasup.fleet.secret_file import fleet_secret
from llamasup.planning.attempts import Planner
from llamasup.planning.facts import DEMO
from llamasup.pool.estimate import prepare_listed
from llamasup.service.inventory import read_inventory
from llamasup.settings.sections import Fleet, FleetModel

if TYPE_CHECKING:
    from ray.serve import Application

    from llamasup.fleet.application import FleetModelSpec
    from llamasup.models.spec import ModelSpec

__all__ = ["APP", "built", "deploy", "down", "status"]

APP = "llamasup"
_NOWHERE = Path("/nonexistent")
_DRAIN_TIMEOUT_S = 60.0


def built(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Application:
    """For ``serve run`` and Serve config files: ``config`` is the path of the config."""
    given = arguments.get("config")
    path = find_config(None if given is None else Path(given), environ)
    return _application(path, load(path, environ), environ, create_secret=False)


def _application(
    path: Path, config: Config, environ: Mapping[str, str], *, create_secret: bool
) -> Application:
    try:
        from llamasup.fleet.application import application
    except ImportError as error:
        raise missing(error) from error
    fleet = config.fleet or Fleet()
    secret = fleet_secret(fleet, environ, create=create_secret)
    return application(fleet, tuple(_specs(path, config, fleet, secret, environ)), secret)


def _specs(
    path: Path, config: Config, fleet: Fleet, secret: str, environ: Mapping[str, str]
) -> Iterator[FleetModelSpec]:
    """Raises ConfigInvalid for a config without models, or with a model that Ray could not place."""
    from llamasup.fleet.application import FleetModelSpec

    registry = read_inventory(config).registry
    if unknown := fleet.models.keys() - registry.specs.keys():
        raise ConfigInvalid(
            f"fleet.models names {sorted(unknown)[0]!r}, which is no model of the config.",
            remedy=f"The models are: {', '.join(registry.specs) or 'none'}.",
        )
    if not registry.specs:
        raise ConfigInvalid("The config has no models to deploy.", remedy="Add them under `models:`.")
    written = msgspec.json.encode(yaml.safe_load(path.read_bytes()))
    keys = "" if (file := config.auth.api_key_file) is None else file.read_text()
    for spec in registry.specs.values():
        own = fleet.models.get(spec.id, FleetModel())
        needs = None if are_given(own) else _needs(spec, config, environ)
        node = NodeSpec(
            model=spec.id,
            source=DEMO if _is_demo(config, spec.id) else spec.source,
            aliases=spec.aliases,
            written=written,
            folder=str(path.absolute().parent),
            secret=secret,
            keys=keys,
            drain_timeout_s=spec.options.drain_timeout_s or _DRAIN_TIMEOUT_S,
        )
        yield FleetModelSpec(node, actor_options(needs, own), own)


def _is_demo(config: Config, model: str) -> bool:
    """Each node writes the demo model itself."""
    return model in config.models and config.models[model].source == DEMO


def _needs(spec: ModelSpec, config: Config, environ: Mapping[str, str]) -> PlannedNeeds:
    """By the plan of this machine. Raises ConfigInvalid if it has no plan."""
    try:
        launch = prepare_listed(spec, runtime=config.runtime, environ=environ)
        plan = Planner(launch, _NOWHERE).admission().plan
    except LlamasupError as error:
        raise ConfigInvalid(
            f"What the model {spec.id!r} needs cannot be computed on this machine: {error.message}",
            remedy=f"Set cpus, gpus and memory under `fleet: models: {spec.id}:`, or deploy from a machine "
            "that has the file and a llama-server.",
        ) from error
    threads = plan.argv[plan.argv.index("--threads") + 1] if "--threads" in plan.argv else "1"
    devices = 0 if plan.device == "CPU" else len(plan.memory.free.names)
    return PlannedNeeds(plan.memory.host_bytes, devices, int(threads))


def deploy(path: Path, environ: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """Deploy the models, wait until Serve has applied it, and return ``status``. An update replaces the
    replicas of changed models one after another. Raises ConfigInvalid and FleetUnusable.
    """
    config = load(path, environ)
    application = _application(path, config, environ, create_secret=True)
    with _connected(config.fleet or Fleet()) as serve:
        try:
            serve.run(application, name=APP, route_prefix="/")
        except RuntimeError as error:
            raise FleetUnusable(
                f"Ray Serve did not apply the deployment: {error}",
                remedy="`llamasup fleet status` shows the state of each model.",
            ) from error
        return _status(serve)


def status(path: Path, environ: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """The deployments and the nodes. Raises FleetUnusable."""
    with _connected(load(path, environ).fleet or Fleet()) as serve:
        return _status(serve)


def down(path: Path, environ: Mapping[str, str] = os.environ) -> None:
    """End all replicas after their requests. Raises FleetUnusable."""
    with _connected(load(path, environ).fleet or Fleet()) as serve:
        serve.delete(APP)


def _status(serve: Any) -> Mapping[str, Any]:
    from llamasup.fleet.application import DIRECTORY

    found = serve.status().applications.get(APP)
    if found is None:
        return {"application": None, "models": [], "nodes": []}
    nodes = []
    if str(found.status.value) == "RUNNING":
        reports = serve.get_deployment_handle(DIRECTORY, APP).nodes.remote().result(timeout_s=10)
        nodes = msgspec.json.decode(reports)
    return {
        "application": str(found.status.value),
        "message": found.message,
        "models": [
            {
                "deployment": name,
                "status": str(deployment.status.value),
                "replicas": dict(deployment.replica_states),
                "message": deployment.message,
            }
            for name, deployment in found.deployments.items()
            if name != DIRECTORY
        ],
        "nodes": nodes,
    }


@contextmanager
def _connected(fleet: Fleet) -> Iterator[Any]:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise missing(error) from error
    connects = not ray.is_initialized()  # else the program that calls us is connected
    if connects:
        try:
            ray.init(address=fleet.ray, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise FleetUnusable(
                f"There is no Ray cluster at {fleet.ray!r}: {str(error).splitlines()[0]}",
                remedy="Start one with `ray start --head`, or set `fleet.ray` to its address.",
            ) from error
    try:
        yield serve
    finally:
        if connects:
            ray.shutdown()
