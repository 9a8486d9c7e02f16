"""Serving as a Python program uses it: options in, a service that runs until it is told to stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from ssl import SSLContext

from llamasup.core.address import Address, addresses, is_loopback, why_no_host
from llamasup.core.errors import UsageInvalid
from llamasup.core.instance import Policy, RestartAsked
from llamasup.core.settings import Settings
from llamasup.effects.keys import KeyFile
from llamasup.effects.ready_file import clear_place
from llamasup.hosted_model import HostedModel
from llamasup.hosting import Hosting, prepare_place
from llamasup.jobs import Job, ServiceOptions, WrapOptions, given_front, refuse_outside, wrap_job
from llamasup.proxy.front import listen
from llamasup.proxy.tls import tls_context
from llamasup.runtime.events import Bus
from llamasup.runtime.instance import InstanceRunner
from llamasup.runtime.launch import Launch, prepare
from llamasup.runtime.planner import Planner
from llamasup.runtime.wrapped import Wrapping

__all__ = ["RunOptions", "Service", "WrapOptions", "is_loopback"]

_NOWHERE = Path("/nonexistent")


@dataclass(frozen=True, slots=True)
class RunOptions(ServiceOptions):
    """What ``llamasup run`` can be told. ``host`` is a name, an address, a path that ends in ``.sock``, or
    several with commas between them; port 0 takes any free one; ``tls_cert`` and ``tls_key`` are PEM files,
    both or neither.
    """

    model: str
    settings: Settings = field(default_factory=Settings)
    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    tls_key: Path | None = None
    runtime: str | None = None
    api_keys: tuple[str, ...] = ()
    """Keys that may infer, beside those of ``api_key_file``."""
    api_key_file: Path | None = None

    @property
    def policy(self) -> Policy:
        return self.shared_policy()


class Service(Hosting):
    """One model, served. Preparing it finds every mistake that can be found before anything is started.

    Raises ModelMissing, ModelInvalid, RuntimeMissing, DoesNotFit, UsageInvalid, ConfigInvalid or UnsafeBind.
    """

    def __init__(
        self, options: RunOptions | WrapOptions, bus: Bus, environ: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(options, RunOptions):
            refuse_bad_address(options)
            key_file = None if options.api_key_file is None else KeyFile(options.api_key_file)
        prepare_place(options)
        self.options = options
        self.launch: Launch | Wrapping
        if isinstance(options, RunOptions):
            self.launch = launch = prepare(
                options.model,
                options.settings,
                runtime=options.runtime,
                environ=os.environ if environ is None else environ,
            )
            Planner(launch, _NOWHERE).check()
            self._job = _run_job(options, launch, key_file)
        else:
            self.launch = options.wrapping
            self._job = wrap_job(options)
        if options.ready_file is not None:
            clear_place(options.ready_file)
        super().__init__(options, bus, listen=self._job.listen, proxy=self._job.proxy)
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets llama-server's output line by line, in a thread of its own; must neither wait nor raise."""
        self._bus = bus
        self._one: HostedModel | None = None

    @property
    def runner(self) -> InstanceRunner | None:
        """The instance, once the service runs."""
        return None if self._one is None else self._one.runner

    def ask_restart(self) -> None:
        """Let the requests in flight finish, then start the server anew. Nothing while stopping."""
        if self._one is not None and not self.stops_asked:
            self._one.runner.post(RestartAsked())

    async def run(self) -> None:
        """Serve until asked to stop, and leave nothing behind.

        Raises PortInUse or PortNotAllowed before anything is started, ServerFailed when llama-server
        cannot be started, GaveUp when it crashed too often.
        """

        def make(folder: Path, address: Address) -> HostedModel:
            policy = self.options.policy
            self._one = HostedModel(
                self._job, policy, self, self._bus, folder, address, log_passed_on=self.on_log
            )
            return self._one

        await self.host(make)


def _run_job(options: RunOptions, launch: Launch, key_file: KeyFile | None) -> Job:
    tls = _tls(options)
    return Job(
        name=launch.model_id,
        aliases=launch.aliases,
        planner=lambda folder: Planner(launch, folder),
        facts=launch.model,
        listen=lambda: (
            given_front(options.sockets, tls)
            if options.sockets
            else listen(addresses(options.host), options.port, tls=tls)
        ),
        proxy=replace(options.shared_proxy(), api_keys=options.api_keys, key_file=key_file),
    )


def _tls(options: RunOptions) -> SSLContext | None:
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if certificate is None else ("--tls-cert", "--tls-key")
        raise UsageInvalid(f"{given} without {missing}.", remedy="TLS takes both files: give the other one.")
    if any(host.endswith(".sock") for host in addresses(options.host)) and not options.sockets:
        raise UsageInvalid(
            f"TLS on a Unix socket (--host {options.host}) protects nothing: no network is between.",
            remedy="Leave --tls-cert and --tls-key out, or listen on an address.",
        )
    return tls_context(str(key), str(certificate))


def refuse_bad_address(options: RunOptions) -> None:
    """X1: whoever can reach the port can use the model, so a way in from outside needs a key."""
    if not 0 <= options.port <= 65535:
        raise UsageInvalid(
            f"--port {options.port} is no port.", remedy="Give 1 to 65535, or 0 for any free one."
        )
    if not addresses(options.host):
        raise UsageInvalid(f"--host {options.host!r} names no address.", remedy="Leave it out for 127.0.0.1.")
    for host in addresses(options.host):
        if remedy := why_no_host(host):
            raise UsageInvalid(f"--host {host!r} is no address.", remedy=remedy)
    if options.api_keys or options.api_key_file or options.insecure_no_auth:
        return
    refuse_outside(addresses(options.host), options.sockets)
