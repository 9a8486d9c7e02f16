"""Lends the memory of this machine to a llama-server on another one (``llamasup rpc-worker``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamasup.cli.command_group import command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.options.parsers import of_kind, whole_number
from llamasup.core.settings.kinds import Listen, SizeText

if TYPE_CHECKING:
    from llamasup.core.supervision.events import Bus
    from llamasup.service.rpc_worker import RpcWorker

commands = command_set()

Host = Annotated[
    str | None,
    option("--host", "ADDRESS", "Loopback or private IPv4 address to listen on. Default: 127.0.0.1."),
]
Port = Annotated[int | None, option("--port", "N", "Port to listen on. Default: 50052.", read=whole_number)]
Runtime = Annotated[
    str | None,
    option(
        "--runtime",
        "PATH|NAME",
        "llama.cpp's rpc-server, or the llama-server next to it. Env: $LLAMASUP_RUNTIME.",
    ),
]
Threads = Annotated[int | None, option("--threads", "N", "Number of CPU threads.", min=1)]
Devices = Annotated[
    list[str] | None, option("--device", "NAME", "A device to offer, such as CUDA0. Repeatable.")
]
Memory = Annotated[
    str | None,
    option(
        "--memory",
        "SIZE",
        "Memory to offer, such as 12GiB, if this rpc-server can limit it.",
        read=of_kind(SizeText(percent=False)),
    ),
]
Cache = Annotated[bool, flag("--cache", "Keep the weights on disk for the next load.")]
Tunnel = Annotated[
    str | None,
    option(
        "--tunnel",
        "HOST:PORT",
        "Accept connections of other llamasups here, with TLS and certificates on both sides.",
        read=of_kind(Listen()),
    ),
]
Cert = Annotated[
    Path | None, typer.Option("--cert", help="With --tunnel: PEM file with the certificate and its chain.")
]
Key = Annotated[Path | None, typer.Option("--key", help="With --tunnel: PEM file with the private key.")]
ClientCa = Annotated[
    Path | None,
    typer.Option("--client-ca", help="With --tunnel: PEM file of the CA of the clients' certificates."),
]


@commands.command()
@takes_groups
def rpc_worker(
    ctx: typer.Context,
    *,
    host: Host = None,
    port: Port = None,
    runtime: Runtime = None,
    threads: Threads = None,
    devices: Devices = None,
    memory: Memory = None,
    cache: Cache = False,
    tunnel: Tunnel = None,
    cert: Cert = None,
    key: Key = None,
    client_ca: ClientCa = None,
    foreground: o.Foreground,
    parent: o.ParentProgram,
    logging: o.Logging,
) -> int:
    """Lend the memory of this machine to another llamasup."""
    from llamasup.cli.foreground import OutputOptions, serve_until_stopped

    def prepare() -> Callable[[Bus], RpcWorker]:
        from llamasup.core.llama_server.rpc.worker_line import WorkerOptions
        from llamasup.service.rpc_worker import RpcWorker, RpcWorkerOptions, listening

        size = None if memory is None else SizeText(percent=False).parse(memory).bytes
        options = RpcWorkerOptions(
            runtime=runtime,
            worker=WorkerOptions(threads, tuple(devices or ()), size, cache),
            **listening(host, port, tunnel, cert=cert, key=key, client_ca=client_ca),
            **foreground,
        )
        return partial(RpcWorker, options)

    output = OutputOptions(**parent, **logging)
    return serve_until_stopped(prepare, output, ctx.obj)
