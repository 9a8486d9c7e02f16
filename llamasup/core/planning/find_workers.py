"""Finds the RPC workers of a plan, and asks them for their devices and memory. Blocks."""

from __future__ import annotations

from collections.abc import Sequence

from llamasup.core.llama_server.argv_builder import read_extra
from llamasup.core.llama_server.rpc.workers import (
    NO_WORKERS,
    TunnelFiles,
    WorkerAnswer,
    Workers,
    choose_workers,
    missing_error,
    need_every_worker,
    why_excluded,
)
from llamasup.core.planning.facts import Launch
from llamasup.errors import UsageInvalid


def find_workers(launch: Launch, *, is_start: bool) -> Workers:
    """Find the RPC workers of the settings.

    Raises UsageInvalid if the settings or the build allow none, and WorkerMissing.
    """
    settings, capabilities = launch.settings, launch.runtime.capabilities
    if not settings.rpc:
        return NO_WORKERS
    if not capabilities.knows("--rpc"):
        raise UsageInvalid(
            f"rpc is not supported: this llama-server ({capabilities.version}) was built without RPC.",
            remedy="Use a llama-server with --rpc (a build with GGML_RPC=ON), or leave rpc out.",
        )
    if (settings.replicas or 1) > 1:
        raise UsageInvalid(
            f"rpc and replicas: {settings.replicas} exclude each other: a worker has one client.",
            remedy="Leave replicas out, or give each of several names its own workers.",
        )
    extra_args = read_extra(capabilities, settings.extra)
    if excluded := why_excluded(extra_args, settings.gpu_layers):
        return Workers(excluded=excluded)
    workers = choose_workers(ask_workers(launch, settings.rpc, is_start=is_start), is_start=is_start)
    if workers.missing and need_every_worker(extra_args):
        raise missing_error(launch.model_id, workers, fits=True)
    return workers


def ask_workers(
    launch: Launch, workers: Sequence[str], *, is_start: bool, again: bool = False
) -> tuple[WorkerAnswer, ...]:
    """Ask the RPC workers. A start has more patience, and tries a worker that is not ready twice."""
    from llamasup.core.llama_server.rpc import ask  # here, to keep the start short

    settings = launch.settings
    files = None
    if settings.rpc_ca and settings.rpc_cert and settings.rpc_key:
        files = TunnelFiles(settings.rpc_ca, settings.rpc_cert, settings.rpc_key)
    return ask.ask_workers(
        launch.runtime,
        launch.environ,
        workers,
        files,
        again=again,
        timeout_s=ask.START_TIMEOUT_S if is_start else ask.ESTIMATE_TIMEOUT_S,
        attempts=2 if is_start and not again else 1,
    )
