"""Models on a Ray cluster: each replica of a Ray Serve deployment is a llamasup on its node.

Ray places, starts, checks, scales and replaces the replicas. The fronts (``llamasup serve`` with ``fleet:``)
take the addresses of the nodes from the directory, and send requests to them directly. Requests that enter at
the address of Ray Serve pass through Ray (``ingress.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: Mapping[str, Any]) -> Application:
    """Build the Serve application: ``serve run llamasup.fleet:app config=/path/to/config.yaml``.

    Raises ConfigInvalid and FleetUnusable.
    """
    # By its name: the package itself needs neither Ray nor the modules with effects.
    return import_module("llamasup.fleet.deploy").built(arguments)
