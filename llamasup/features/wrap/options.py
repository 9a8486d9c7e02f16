"""The options of ``wrap``, and the service that is made from these options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from llamasup.core.http.heads import HeadRules
from llamasup.core.pool.estimate import Starter
from llamasup.core.proxy.listeners.listen import ListenerSet, listen
from llamasup.core.proxy.listeners.tls import TlsContext
from llamasup.core.proxy.settings import Limits
from llamasup.core.supervision.states import Policy
from llamasup.errors import UsageInvalid
from llamasup.features.wrap.planner import WrappedPlanner, Wrapping, prober_for
from llamasup.service.models import HostedEntry, OnlyEntry
from llamasup.service.options import (
    BODY_BYTES,
    UNBOUNDED,
    ServiceOptions,
    ServiceSpec,
    inherited_listeners,
    require_key_if_reachable,
    sweep_and_check,
)

_TIMEOUT_S = 3600.0  # llama-server's default (b11434)


class WrapOptions(ServiceOptions, frozen=True):
    """The options of ``llamasup wrap``. ``parse_command`` makes ``wrapping``."""

    wrapping: Wrapping
    strict: bool = False
    """Check Host, Origin and paths like ``llamasup run``; llama-server accepts all of them."""
    waits_for_first_load: bool = False
    """Let requests also wait for the first load; llama-server would answer 503."""

    @property
    def policy(self) -> Policy:
        # With socket activation, the client whose connection started the service waits for it.
        waits = self.waits_for_first_load or bool(self.sockets)
        return replace(
            super().policy,
            # Without a request for a token, /health must do.
            warm_up=self.warm_up and self.wrapping.probe_class is not None,
            knows_all_keys=False,  # a script may set one
            limits_to_slots=self.strict,
            waits_for_first_load=self.wait_timeout_s > 0 and waits,
        )

    def spec(self, environ: Mapping[str, str]) -> ServiceSpec:
        """Make the service. With ``strict`` it has the security checks of ``run``.

        Raises UnsafeBind, UsageInvalid and ConfigInvalid.
        """
        sweep_and_check(self)
        self._refuse_conflicts()
        wrapping, line = self.wrapping, self.wrapping.line
        tls = TlsContext(line.tls.key_file, line.tls.cert_file) if line.tls else None
        shared = self.shared_proxy()
        proxy = replace(
            shared,
            api_keys=wrapping.api_keys if self.strict else (),
            rules=HeadRules(
                transparent=not self.strict,
                credentials=not wrapping.needs_own_key,
                prefix=line.api_prefix.encode(),
            ),
            limits=shared.limits if self.strict else self._limits(),
        )
        starter = Starter(
            lambda name, number, folder, prefix, share: WrappedPlanner(wrapping, folder),
            cwd=wrapping.cwd,
            prober=lambda plan: prober_for(wrapping, plan),
        )

        def open_listeners() -> ListenerSet:
            if self.sockets:
                return inherited_listeners(self.sockets, tls)
            return listen(line.hosts, line.port, reuse_port=line.reuse_port, dual_stack=True, tls=tls)

        entry = OnlyEntry(line.name, starter, passes_exit_code=True)
        models = partial(HostedEntry, entry, self.policy)
        return ServiceSpec(models, open_listeners, proxy, launch=wrapping)

    def _refuse_conflicts(self) -> None:
        wrapping, line = self.wrapping, self.wrapping.line
        if not self.strict and (self.hosts or self.origins or self.remote_media):
            raise UsageInvalid(
                "Without --strict, wrap accepts every Host, Origin and URL, as llama-server does;"
                " allowing single ones has no effect.",
                remedy="Add --strict, or remove --allow-host, --allow-origin and --remote-media.",
            )
        if self.strict and not line.has_plain_prefix:
            raise UsageInvalid(
                f"--api-prefix {line.api_prefix!r} cannot be used with --strict: llama-server reads it as a"
                " regular expression, so it also serves closed paths below other prefixes.",
                remedy="Use a prefix of /, letters, digits, _, ~ and -, such as /llm/v2, or remove --strict.",
            )
        if self.strict and not (wrapping.has_keys or self.insecure_no_auth):
            require_key_if_reachable(
                line.hosts, self.sockets, set_key="Give llama-server a key with --api-key-file"
            )

    def _limits(self) -> Limits:
        """Return the limits of llama-server itself."""
        timeout_s = self.wrapping.line.timeout_s or _TIMEOUT_S
        body_bytes = BODY_BYTES if self.max_body is None else self.max_body.of(UNBOUNDED)
        return Limits(
            body_bytes=body_bytes,
            head_s=timeout_s,
            body_idle_s=timeout_s,
            body_rate_bytes=1,
            bodies_bytes=8 * body_bytes,
            bodies_per_client_bytes=8 * body_bytes,
            send_stall_s=timeout_s,
            connections_per_client=Limits().connections,  # no limit of its own, like llama-server
        )
