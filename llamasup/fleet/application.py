"""Makes the Serve application: one deployment for each model, and the directory. Imports Ray.

Its ingress is the directory itself, or with ``fleet.ingress`` a deployment that serves clients.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from llamasup._version import __version__
from llamasup.fleet.deployments import REPORT_S, Directory, IngressDeployment, Node
from llamasup.fleet.ingress import IngressSettings
from llamasup.fleet.messages import LEAVE_S, ListedModel
from llamasup.fleet.node_process import STOP_S, NodeSpec
from llamasup.fleet.replicas import ScaleByLoad
from llamasup.fleet.request_router import PromptRouter
from llamasup.fleet.secret import fleet_id
from llamasup.fleet.serve_view import DIRECTORY, FLEET_ID, INGRESS, Deployed, deployment_name, next_version
from llamasup.fleet.settings import Fleet, FleetModel

_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
_ONGOING = 1_000_000  # Serve's limit of requests for a replica; llamasup has its own
_ONE_LOOP: Final = MappingProxyType(
    {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
)
"""Serve (2.60) has three loops in a replica, and each chunk would pass between them twice. The ingress needs
one: it was half the CPU time for a chunk (scripts/bench/fleet.py)."""

_ROUTER: Final[Mapping[str, Any]] = {
    "request_router_class": f"{PromptRouter.__module__}.{PromptRouter.__name__}",
    "request_routing_stats_period_s": REPORT_S,
}


class FleetModelSpec(Struct, frozen=True):
    """A model to deploy. ``node`` has no secret yet: ``application`` adds it. ``actor_options``: what Ray
    reserves for each replica. ``own``: the result of ``given_for``.
    """

    node: NodeSpec
    aliases: tuple[str, ...]
    actor_options: Mapping[str, Any]
    own: FleetModel


def application(
    fleet: Fleet,
    models: Iterable[FleetModelSpec],
    secret: str,
    deployed: Mapping[str, Deployed] = MappingProxyType({}),
    ingress: IngressSettings | None = None,
) -> serve.Application:
    """Build the application. ``deployed``: what runs already, by the names of the deployments. ``ingress``:
    None if clients use only fronts.
    """
    specs = {spec.node.model: spec for spec in models}
    handles = {model: _model(fleet, spec, secret, deployed) for model, spec in specs.items()}
    listed = [ListedModel(model, spec.aliases) for model, spec in specs.items()]
    directory = serve.deployment(Directory).options(
        name=DIRECTORY,
        ray_actor_options={"num_cpus": 0},
        num_replicas=1,
        max_ongoing_requests=_ONGOING,
        user_config={FLEET_ID: fleet_id(secret)},
    )
    encoded = msgspec.json.encode(listed)
    least = msgspec.json.encode({model: spec.own.min_replicas or 0 for model, spec in specs.items()})
    versioned_directory = _versioned(directory, deployed, encoded, secret.encode(), least)
    bound = versioned_directory.bind(encoded, secret, handles, least)
    if ingress is None:
        return bound
    deployment = serve.deployment(IngressDeployment).options(
        name=INGRESS,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": dict(_ONE_LOOP)}},
        num_replicas=1,
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=fleet.drain_timeout_s + 10.0,
        max_surge_percent=100,  # an update loses no request
    )
    settings = msgspec.json.encode(ingress)
    versioned = _versioned(deployment, deployed, settings, encoded, secret.encode())
    return versioned.bind(settings, encoded, secret, bound, handles)


def _model(
    fleet: Fleet, spec: FleetModelSpec, secret: str, deployed: Mapping[str, Deployed]
) -> serve.Application:
    # Serve's look-back window; the delays come after it.
    window_s = min(5.0, max(1.0, fleet.upscale_after_s))
    scaling = AutoscalingConfig(
        min_replicas=spec.own.min_replicas,
        max_replicas=spec.own.max_replicas,
        metrics_interval_s=min(1.0, window_s / 2),
        look_back_period_s=window_s,
        upscale_delay_s=fleet.upscale_after_s,
        downscale_delay_s=fleet.downscale_after_s,
        downscale_to_zero_delay_s=0.0,  # the policy waits
        policy=AutoscalingPolicy(
            policy_function=ScaleByLoad,
            policy_kwargs={
                "target": fleet.target_load / 100,
                "idle_after_s": fleet.idle_after_s,
                "sleeps": spec.own.when_idle == "sleep",
            },
        ),
    )
    serve_drain_s = spec.node.drain_timeout_s if fleet.ingress else 0.0
    node = serve.deployment(Node).options(
        name=deployment_name(spec.node.model),
        ray_actor_options=dict(spec.actor_options),
        autoscaling_config=scaling,
        max_ongoing_requests=_ONGOING,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        # First Serve waits for the requests that came through it, then the node for all others. Serve (2.60)
        # has no limit for the first wait, and kills the replica after the whole time.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=serve_drain_s + LEAVE_S + 2.0 + spec.node.drain_timeout_s + STOP_S + 10.0,
        request_router_config=RequestRouterConfig(**_ROUTER) if fleet.ingress else RequestRouterConfig(),
        max_surge_percent=100 if fleet.surge else 0,
    )
    encoded = msgspec.json.encode(replace(spec.node, secret=secret))
    return _versioned(node, deployed, encoded).bind(encoded)


def _versioned(
    deployment: serve.Deployment, deployed: Mapping[str, Deployed], *parts: bytes
) -> serve.Deployment:
    """Give ``deployment`` a version of its content and of llamasup.

    Without one, ``serve.run`` (2.60) replaces all replicas at each deployment, even unchanged ones.
    No public option sets it; ``serve deploy`` sets the versions itself.
    """
    content = hashlib.sha256(b"\0".join((__version__.encode(), *parts))).hexdigest()[:16]
    deployment._version = next_version(content, deployed.get(deployment.name), secrets.token_hex(4))
    return deployment
