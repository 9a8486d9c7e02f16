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
from msgspec import Struct

from llamasup.core.config.config_keys import Config
from llamasup.core.config.inventory import read_inventory
from llamasup.core.config.nodes import Table, parse
from llamasup.core.config.reading import find_config, load
from llamasup.core.planning.facts import DEMO
from llamasup.core.planning.planner import Planner
from llamasup.core.pool.estimate import prepare_listed
from llamasup.errors import ConfigInvalid, FleetLate, FleetUnusable, LlamasupError
from llamasup.features import config_keys
from llamasup.fleet.certificates import missing
from llamasup.fleet.ingress_settings import ingress_settings, refuse_without_key
from llamasup.fleet.messages import LEAVE_S, NodeReport
from llamasup.fleet.node_config import node_config
from llamasup.fleet.node_process import STOP_S, NodeSpec
from llamasup.fleet.replicas import PlannedNeeds, actor_options, are_given, given_for
from llamasup.fleet.secret import fleet_id
from llamasup.fleet.secret_file import fleet_secret
from llamasup.fleet.serve_view import (
    DIRECTORY,
    FLEET_ID,
    Deployed,
    has_failed,
    is_reached_at,
    reason,
    route_prefix,
    serve_address,
    status_of,
    why_not_ready,
)
from llamasup.fleet.settings import FLEET, Fleet

if TYPE_CHECKING:
    from ray.serve import Application

    from llamasup.core.models.spec import ModelSpec
    from llamasup.fleet.application import FleetModelSpec

TIMEOUT_S: Final = 600.0
_NOWHERE = Path("/nonexistent")
_LOOK_AGAIN_S = 0.5
_ANSWER_S = 5.0  # of the directory
_RAY_S = 60.0  # what Ray may need on top, on a busy machine


def built(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Application:
    """Build the application for ``serve run`` and Serve config files. ``config``: the path of the config."""
    given = arguments.get("config")
    path = find_config(None if given is None else Path(given), environ)
    config = load(path, environ, config_keys())
    fleet = config.of(FLEET) or Fleet()
    models = _models(path, config, environ, _refuse_plan)
    from llamasup.fleet.application import application

    secret = fleet_secret(fleet, environ)
    # Where Serve listens is known where the ingress starts; it refuses an unsafe address itself.
    return application(fleet, models, secret, ingress=ingress_settings(config, secret, environ))


_Needs = Callable[["ModelSpec", Config, Mapping[str, str]], PlannedNeeds]


def _models(
    path: Path, config: Config, environ: Mapping[str, str], needs: _Needs
) -> tuple[FleetModelSpec, ...]:
    """Raises ConfigInvalid for a config without models, or with a model that Ray could not place; and
    FleetUnusable without the packages.
    """
    root, _ = parse(path.read_bytes(), str(path), 0)
    if not isinstance(root, Table):
        raise ConfigInvalid(
            f"The config {str(path)!r} cannot be read again.", remedy="Give the path of a regular file."
        )
    return tuple(_specs(path, root, config, needs, environ))


def _specs(
    path: Path, written: Table, config: Config, needs: _Needs, environ: Mapping[str, str]
) -> Iterator[FleetModelSpec]:
    try:
        from llamasup.fleet.application import FleetModelSpec
    except ImportError as error:
        raise missing(error) from error

    fleet = config.of(FLEET) or Fleet()
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
        is_demo = spec.id in config.models and config.models[spec.id].source == DEMO  # a node writes it
        node = node_config(
            written,
            folder=str(path.absolute().parent),
            model=spec.id,
            source=DEMO if is_demo else spec.source,
            aliases=spec.aliases,
            sleeps_after_s=fleet.idle_after_s if own.when_idle == "sleep" else None,
        )
        planned = None if are_given(own) else needs(spec, config, environ)
        yield FleetModelSpec(
            NodeSpec(spec.id, node, drain_timeout_s=fleet.drain_timeout_s),
            spec.aliases,
            actor_options(spec.id, planned, own),
            own,
        )


def _needs(spec: ModelSpec, config: Config, environ: Mapping[str, str]) -> PlannedNeeds:
    """Return the needs by the plan of this machine. Raises ConfigInvalid if it has no plan."""
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


class Cluster(Struct, frozen=True):
    """A Ray cluster with its Serve. ``client``: the private one of Serve (2.60), for what no public function
    tells. ``address``: HOST:PORT of its head.
    """

    serve: Any
    client: Callable[..., Any]
    address: str


def deploy(
    path: Path,
    environ: Mapping[str, str] = os.environ,
    *,
    timeout_s: float = TIMEOUT_S,
    pause: Callable[[float], None] = sleep,
) -> Mapping[str, Any]:
    """Deploy the models, wait until all runs that should, and return ``status``. An update replaces the
    replicas of changed models one after another. ``pause`` is called between two looks, and may raise to end
    the wait. Raises ConfigInvalid and FleetUnusable.
    """
    config = load(path, environ, config_keys())
    fleet = config.of(FLEET) or Fleet()
    models = _models(path, config, environ, _needs)
    from llamasup.fleet.application import application

    with _connected(fleet) as cluster:
        deployed = _deployed(cluster, fleet, environ)
        secret = fleet_secret(fleet, environ, create=deployed is None)
        ingress = ingress_settings(config, secret, environ)
        if ingress is not None:
            refuse_without_key(ingress, *serve_address(fleet))
        _start_serve(cluster, fleet)
        if ingress is not None:
            http = cluster.client().http_config
            refuse_without_key(ingress, http.host, http.port)
        target = application(fleet, models, secret, deployed or {}, ingress)
        cluster.serve.run_many(
            [cluster.serve.RunTarget(target=target, name=fleet.name, route_prefix=route_prefix(fleet))],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        shown: Mapping[str, Any] = {}

        def is_over() -> bool:
            nonlocal shown
            shown = _status(cluster, fleet)
            return shown["application"] in ("running", "failed")

        if not _wait(is_over, timeout_s, pause):
            raise FleetLate(
                f"The fleet does not run {timeout_s:.0f} s after its deployment: {why_not_ready(shown)}",
                remedy="Ray continues. `llamasup fleet status` shows the state of each model; `ray status` "
                "whether the cluster has free CPUs, GPUs and memory.",
            )
        if shown["application"] == "failed":
            raise FleetUnusable(
                f"The fleet was deployed, and does not run: {why_not_ready(shown)}",
                remedy="Correct the reported problem, and deploy again.",
            )
        return shown


def _start_serve(cluster: Cluster, fleet: Fleet) -> None:
    """A Serve that runs already keeps its address. Raises ConfigInvalid if it is another one."""
    host, port = serve_address(fleet)
    ran = cluster.client(raise_if_no_controller_running=False) is not None
    try:
        cluster.serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    except Exception:
        if not ran:  # its controller runs, and would keep an address that cannot be used
            cluster.serve.shutdown()
        raise
    http = cluster.client().http_config
    if not is_reached_at((host, port), (http.host, http.port)):
        raise ConfigInvalid(
            f"Ray Serve runs at {http.host}:{http.port} already, and fronts of this config expect it at "
            f"{host}:{port}.",
            remedy="Set `fleet.directory` or `fleet.listen` to its address; or stop Serve with all of its "
            "applications (`serve shutdown -y`), and deploy again.",
        )


def status(path: Path, environ: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """Return the deployments and the nodes. Raises ConfigInvalid and FleetUnusable."""
    fleet = load(path, environ, config_keys()).of(FLEET) or Fleet()
    with _connected(fleet) as cluster:
        _deployed(cluster, fleet, environ)
        return _status(cluster, fleet)


def down(
    path: Path,
    environ: Mapping[str, str] = os.environ,
    *,
    timeout_s: float | None = None,
    pause: Callable[[float], None] = sleep,
) -> Mapping[str, Any]:
    """End all replicas after their requests. ``timeout_s``: None for as long as this may take. ``pause``: as
    for ``deploy``. Returns whether anything was deployed. Raises ConfigInvalid and FleetUnusable.
    """
    fleet = load(path, environ, config_keys()).of(FLEET) or Fleet()
    if timeout_s is None:
        timeout_s = ends_within_s(fleet)
    with _connected(fleet) as cluster:
        ended = _deployed(cluster, fleet, environ) is not None
        if ended:
            cluster.serve.delete(fleet.name, _blocking=False)
            if not _wait(lambda: fleet.name not in cluster.serve.status().applications, timeout_s, pause):
                raise FleetLate(
                    f"The fleet has not stopped within {timeout_s:.0f} s: a replica waits for its requests.",
                    remedy="Ray continues. `llamasup fleet status` shows what still runs.",
                )
        return {"ended": ended, **_name(cluster, fleet)}


def ends_within_s(fleet: Fleet) -> float:
    """All replicas end at the same time."""
    drains = 2 if fleet.ingress else 1  # Serve waits for the requests of its own address first
    return drains * fleet.drain_timeout_s + LEAVE_S + STOP_S + _RAY_S


def _wait(holds: Callable[[], bool], timeout_s: float, pause: Callable[[float], None]) -> bool:
    deadline_s = monotonic() + timeout_s
    while not holds():
        if monotonic() > deadline_s:
            return False
        pause(_LOOK_AGAIN_S)
    return True


def _deployed(cluster: Cluster, fleet: Fleet, environ: Mapping[str, str]) -> Mapping[str, Deployed] | None:
    """Return what Serve has of the fleet, by the name of the deployment, and None if it has nothing. Raises
    ConfigInvalid if Serve has another fleet of this name.
    """
    application = cluster.serve.status().applications.get(fleet.name)
    if application is None:
        return None
    if application.status.value == "DELETING":  # its deployments vanish one after another
        return {}
    found = {}
    for name, deployment in application.deployments.items():
        known, _ = cluster.client().get_deployment_info(name, fleet.name)
        found[name] = Deployed(known.version or "", has_failed(deployment))
        if name == DIRECTORY:
            deployed_id = (known.deployment_config.user_config or {}).get(FLEET_ID)
            if deployed_id == fleet_id(fleet_secret(fleet, environ)):
                continue
            raise ConfigInvalid(
                f"The fleet {fleet.name!r} on the Ray cluster at {cluster.address} has another secret than "
                "this config, so it is another fleet.",
                remedy="Copy the file with its secret (`fleet.key_file`) from the machine that deployed it, "
                "or give this fleet another name in `fleet.name`.",
            )
    if application.deployments and DIRECTORY not in found:
        raise ConfigInvalid(
            f"The application {fleet.name!r} of Ray Serve at {cluster.address} is no fleet of llamasup.",
            remedy="Give this fleet another name in `fleet.name`.",
        )
    return found


def _status(cluster: Cluster, fleet: Fleet) -> Mapping[str, Any]:
    application = cluster.serve.status().applications.get(fleet.name)
    directory = None if application is None else application.deployments.get(DIRECTORY)
    name = _name(cluster, fleet)
    if directory is None or not directory.replica_states.get("RUNNING"):
        return {**name, **status_of(application, None, no_nodes="The directory is starting.")}
    try:
        handle = cluster.serve.get_deployment_handle(DIRECTORY, fleet.name)
        found = handle.nodes.remote().result(timeout_s=_ANSWER_S)
    except Exception as error:  # Ray's handles raise many errors; the state of the models is known without it
        no_nodes = f"The directory does not answer: {_said(error)}"
        return {**name, **status_of(application, None, no_nodes=no_nodes)}
    return {**name, **status_of(application, msgspec.json.decode(found, type=list[tuple[NodeReport, bool]]))}


def _name(cluster: Cluster, fleet: Fleet) -> Mapping[str, str]:
    return {"fleet": fleet.name, "cluster": cluster.address}


def _said(error: BaseException) -> str:
    return reason(str(error)) or type(error).__name__


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray (2.60) would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


@contextmanager
def _connected(fleet: Fleet) -> Iterator[Cluster]:
    """Yield Serve of the fleet's cluster. Raises FleetUnusable, even for what Ray raises in the block."""
    try:
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.context import _get_global_client
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
                f"There is no Ray cluster at {fleet.ray!r}: {_said(error)}",
                remedy="Start one with `ray start --head`, or set `fleet.ray` to its address.",
            ) from error
    address = ray.get_runtime_context().gcs_address
    try:
        yield Cluster(serve, _get_global_client, address)
    except (RayError, RayServeException, OSError, RuntimeError, ValueError) as error:
        # Ray's time-outs are TimeoutErrors, which are OSErrors.
        failure = FleetLate if isinstance(error, TimeoutError) else FleetUnusable
        raise failure(
            f"Ray at {address} failed: {reason(f'{type(error).__name__}: {error}')}",
            remedy="`ray status` shows the state of the cluster; its logs are in "
            "/tmp/ray/session_latest/logs.",
        ) from error
    finally:
        if connects:
            ray.shutdown()
