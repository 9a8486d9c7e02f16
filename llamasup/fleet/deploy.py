"""Builds the Serve application from a config, and deploys it, shows it and ends it. Imports Ray late."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llamasup.config import Config, load
from llamasup.config.nodes import Table, parse
from llamasup.config.sources import find_config
from llamasup.errors import ConfigInvalid, FleetUnusable, LlamasupError
from llamasup.fleet.certificates import missing
from llamasup.fleet.messages import NodeReport
from llamasup.fleet.node_config import node_config
from llamasup.fleet.node_process import NodeSpec
from llamasup.fleet.resources import PlannedNeeds, actor_options, are_given, given_for
from llamasup.fleet.secret_file import fleet_secret
from llamasup.fleet.serve_view import DIRECTORY, first_line, serve_address, status_of, why_not_ready
from llamasup.planning.attempts import Planner
from llamasup.planning.facts import DEMO
from llamasup.pool.estimate import prepare_listed
from llamasup.service.inventory import read_inventory
from llamasup.settings.sections import Fleet

if TYPE_CHECKING:
    from ray.serve import Application

    from llamasup.fleet.application import FleetModelSpec
    from llamasup.models.spec import ModelSpec

__all__ = ["APP", "TIMEOUT_S", "built", "deploy", "down", "status"]

APP: Final = "llamasup"
TIMEOUT_S: Final = 600.0
_NOWHERE = Path("/nonexistent")
_LOOK_AGAIN_S = 0.5
_ANSWER_S = 5.0  # of the directory


def built(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Application:
    """For ``serve run`` and Serve config files: ``config`` is the path of the config."""
    given = arguments.get("config")
    path = find_config(None if given is None else Path(given), environ)
    return _application(path, load(path, environ), environ, with_serve=True)


def _application(path: Path, config: Config, environ: Mapping[str, str], *, with_serve: bool) -> Application:
    """``with_serve``: Serve builds it, on any machine of the cluster."""
    try:
        from llamasup.fleet.application import application
    except ImportError as error:
        raise missing(error) from error
    fleet = config.fleet or Fleet()
    root, _ = parse(path.read_bytes(), str(path), 0)
    if not isinstance(root, Table):
        raise ConfigInvalid(
            f"The config {str(path)!r} cannot be read again.", remedy="Give the path of a regular file."
        )
    secret = fleet_secret(fleet, environ, create=not with_serve)
    needs = _refuse_plan if with_serve else _needs
    return application(fleet, tuple(_specs(path, root, config, secret, needs, environ)), secret)


_Needs = Callable[["ModelSpec", Config, Mapping[str, str]], PlannedNeeds]


def _specs(
    path: Path, written: Table, config: Config, secret: str, needs: _Needs, environ: Mapping[str, str]
) -> Iterator[FleetModelSpec]:
    """Raises ConfigInvalid for a config without models, or with a model that Ray could not place."""
    from llamasup.fleet.application import FleetModelSpec

    fleet = config.fleet or Fleet()
    registry = read_inventory(config).registry
    if unknown := fleet.models.keys() - registry.specs.keys():
        raise ConfigInvalid(
            f"fleet.models names {sorted(unknown)[0]!r}, which is no model of the config.",
            remedy=f"The models are: {', '.join(registry.specs) or 'none'}.",
        )
    if not registry.specs:
        raise ConfigInvalid("The config has no models to deploy.", remedy="Add them under `models:`.")
    for spec in registry.specs.values():
        own = given_for(spec.id, fleet)
        node = node_config(
            written,
            folder=str(path.absolute().parent),
            model=spec.id,
            source=DEMO if _is_demo(config, spec.id) else spec.source,
            aliases=spec.aliases,
        )
        planned = None if are_given(own) else needs(spec, config, environ)
        yield FleetModelSpec(
            NodeSpec(spec.id, node, secret, fleet.drain_timeout_s),
            spec.aliases,
            actor_options(spec.id, planned, own),
            own,
        )


def _is_demo(config: Config, model: str) -> bool:
    """Each node writes the demo model itself."""
    return model in config.models and config.models[model].source == DEMO


def _needs(spec: ModelSpec, config: Config, environ: Mapping[str, str]) -> PlannedNeeds:
    """By the plan of this machine. Raises ConfigInvalid if it has no plan."""
    try:
        launch = prepare_listed(spec, runtime=config.runtime.path, environ=environ)
        plan = Planner(launch, _NOWHERE).admission().plan
    except LlamasupError as error:
        raise ConfigInvalid(
            f"What the model {spec.id!r} needs cannot be computed on this machine: {error.message}",
            remedy=f"Set cpus, gpus and memory under `fleet: models: {spec.id}:`, or deploy from a machine "
            "that has the file and a llama-server.",
        ) from error
    threads = plan.argv[plan.argv.index("--threads") + 1] if "--threads" in plan.argv else "1"
    devices = 0 if plan.device == "CPU" else len(plan.memory.free.names)
    return PlannedNeeds(plan.memory.host_bytes, devices, int(threads), spec.options.gpu_layers != 0)


def _refuse_plan(spec: ModelSpec, config: Config, environ: Mapping[str, str]) -> PlannedNeeds:
    raise ConfigInvalid(
        f"What Ray should reserve for the model {spec.id!r} is not known: Serve builds the application on "
        "any machine of the cluster, so no plan is made.",
        remedy=f"Set cpus, gpus and memory under `fleet: models: {spec.id}:`.",
    )


# --- the commands ------------------------------------------------------------------------------------


def deploy(
    path: Path, environ: Mapping[str, str] = os.environ, *, timeout_s: float = TIMEOUT_S
) -> Mapping[str, Any]:
    """Deploy the models, wait until all runs that should, and return ``status``. An update replaces the
    replicas of changed models one after another. Raises ConfigInvalid and FleetUnusable.
    """
    config = load(path, environ)
    fleet = config.fleet or Fleet()
    application = _application(path, config, environ, with_serve=False)
    with _connected(fleet) as serve:
        host, port = serve_address(fleet)
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        serve.run_many(
            [serve.RunTarget(target=application, name=APP, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        shown: Mapping[str, Any] = {}

        def is_over() -> bool:
            nonlocal shown
            shown = _status(serve)
            return shown["application"] in ("running", "failed")

        if not _wait(is_over, timeout_s):
            raise FleetUnusable(
                f"The fleet does not run {timeout_s:.0f} s after its deployment: {why_not_ready(shown)}",
                remedy="Ray goes on. `llamasup fleet status` shows the state of each model; `ray status` "
                "whether the cluster has free CPUs, GPUs and memory.",
            )
        if shown["application"] == "failed":
            raise FleetUnusable(
                f"Ray Serve could not apply the deployment: {why_not_ready(shown)}",
                remedy="Correct the config, and deploy it again.",
            )
        return shown


def status(path: Path, environ: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """The deployments and the nodes. Raises FleetUnusable."""
    with _connected(load(path, environ).fleet or Fleet()) as serve:
        return _status(serve)


def down(path: Path, environ: Mapping[str, str] = os.environ, *, timeout_s: float = TIMEOUT_S) -> bool:
    """End all replicas after their requests. False if nothing was deployed. Raises FleetUnusable."""
    with _connected(load(path, environ).fleet or Fleet()) as serve:
        if APP not in serve.status().applications:
            return False
        serve.delete(APP, _blocking=False)
        if not _wait(lambda: APP not in serve.status().applications, timeout_s):
            raise FleetUnusable(
                f"The fleet has not ended within {timeout_s:.0f} s: a replica waits for its requests.",
                remedy="Ray goes on. `llamasup fleet status` shows what still runs.",
            )
        return True


def _wait(holds: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = monotonic() + timeout_s
    while not holds():
        if monotonic() > deadline_s:
            return False
        sleep(_LOOK_AGAIN_S)
    return True


def _status(serve: Any) -> Mapping[str, Any]:
    application = serve.status().applications.get(APP)
    directory = None if application is None else application.deployments.get(DIRECTORY)
    if directory is None or not directory.replica_states.get("RUNNING"):
        return status_of(application, None, no_nodes="The directory is starting.")
    try:
        found = serve.get_deployment_handle(DIRECTORY, APP).nodes.remote().result(timeout_s=_ANSWER_S)
    except Exception as error:  # Ray's handles raise many errors; the state of the models is known without it
        return status_of(application, None, no_nodes=f"The directory does not answer: {first_line(error)}")
    return status_of(application, msgspec.json.decode(found, type=list[tuple[NodeReport, bool]]))


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray (2.60) would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


@contextmanager
def _connected(fleet: Fleet) -> Iterator[Any]:
    """Serve of the fleet's cluster. Raises FleetUnusable, also for what Ray raises in the block."""
    try:
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException
    except ImportError as error:
        raise missing(error) from error
    connects = not ray.is_initialized()  # else the program that calls us is connected
    if connects:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            _check_reachable(fleet.ray)
            ray.init(address=fleet.ray, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise FleetUnusable(
                f"There is no Ray cluster at {fleet.ray!r}: {first_line(error)}",
                remedy="Start one with `ray start --head`, or set `fleet.ray` to its address.",
            ) from error
    try:
        yield serve
    except (RayError, RayServeException, RuntimeError, TimeoutError) as error:
        raise FleetUnusable(
            f"Ray failed: {type(error).__name__}: {first_line(error)}",
            remedy="`ray status` shows the state of the cluster; its logs are in "
            "/tmp/ray/session_latest/logs.",
        ) from error
    finally:
        if connects:
            ray.shutdown()
