"""The current API keys and the use of their limits, for all sockets of a proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from llamasup.core.auth.api_key import ApiKey, KeyLimits, KeyRing, plain_keys
from llamasup.core.auth.key_source import PROCESS_SALT, KeyFile
from llamasup.core.auth.quota import Quota
from llamasup.core.http.heads import HttpError


class CountedRequest(Protocol):
    """The parts of a request that the limits of a key count. ``Keys`` sets ``quota`` and ``counted``."""

    quota: Quota | None
    """The quota of its key, which the request has entered and must leave."""
    counted: int
    """How many of its jobs the quota counts."""

    @property
    def key(self) -> ApiKey | None: ...
    @property
    def is_limited(self) -> bool: ...
    @property
    def jobs(self) -> int: ...


class Keys:
    """The keys that are valid now, with the use of their limits.

    ``epoch`` increases when the keys change; a decision of an earlier epoch must be made again.

    ``needed``: every request needs a key, even after the last key of the file was revoked.
    """

    def __init__(self, file: KeyFile | None, given: Iterable[str], clock: Callable[[], float]) -> None:
        """Take keys with rights and limits from ``file``; ``given`` are inference keys without limits."""
        self.clock = clock
        self._file = file
        self._given = plain_keys(given, PROCESS_SALT)
        self.needed = self._file is not None or bool(self._given)
        self._limits: dict[str, KeyLimits] = {}  # by name; only keys with limits
        self._quotas: dict[str, Quota] = {}  # by name; only keys that were used
        self._minted: tuple[ApiKey, ...] = ()
        self.on_look: Callable[[], None] | None = None
        """Called each second in which a connection is open, to end what has expired."""
        self.epoch = 0
        self.ring = KeyRing(())
        self._reload()

    def look(self) -> None:
        """Read the key file again if it changed. Costs a stat() if not."""
        if self._file is not None and self._file.changed():
            self._reload()
        if self.on_look is not None:
            self.on_look()

    @property
    def has_minted(self) -> bool:
        """Whether there are keys of ``mint``."""
        return bool(self._minted)

    def mint(self, key: ApiKey) -> None:
        """Accept one more key, until ``revoke``. It gives a client a name even where no key is needed."""
        self._minted += (key,)
        self._reload()

    def revoke(self, key: ApiKey) -> None:
        """End a key of ``mint``."""
        self._minted = tuple(minted for minted in self._minted if minted is not key)
        self._reload()

    def of_client(self, client: str) -> ApiKey | None:
        """Find the key whose client has this name in records; None if it has been removed."""
        known = () if self._file is None else self._file.keys
        return next((key for key in (*known, *self._given) if key.client == client), None)

    def current(self, key: ApiKey) -> ApiKey | None:
        """Return the key as the file has it now; None if it has been removed."""
        known = () if self._file is None else self._file.keys
        return next((now for now in known if (now.salt, now.digest) == (key.salt, key.digest)), None)

    def enter(self, request: CountedRequest) -> HttpError | None:
        """Count a request, or return the refusal if its key has reached a limit.

        A request is counted once, also if it enters again because its generation ended during its body.
        """
        key = request.key
        if key is None or not key.limits or request.quota is not None or not request.is_limited:
            return None
        limits = self._limits.get(key.name)
        if limits is None:
            return None  # the key was revoked while the body arrived: its last request
        now = self.clock()
        quota = self._quotas.get(key.name)
        if quota is None:
            quota = self._quotas[key.name] = Quota(limits, now)
        refusal = quota.enter(now)
        if refusal is None:
            request.quota = quota
        return refusal

    def weigh(self, request: CountedRequest) -> HttpError | None:
        """Count all jobs of a request that entered as one job, or return the refusal."""
        if request.quota is None:
            return None
        refusal = request.quota.weigh(request.jobs)
        if refusal is None:
            request.counted = request.jobs
        return refusal

    def leave(self, request: CountedRequest, tokens: int, *, refund: bool) -> None:
        """Finish a request that cost ``tokens``.

        With ``refund``, it is not counted as a request of its key.
        """
        quota, request.quota = request.quota, None
        if quota is not None:
            now = self.clock()
            quota.leave(tokens, now, request.counted)
            if refund:
                quota.refund(now)

    def _reload(self) -> None:
        """Use is kept by name: a key that keeps its name keeps its use, with its new limits."""
        file_keys = self._file.keys if self._file is not None else ()
        # The file first: it has the limits.
        self.ring = KeyRing((*file_keys, *self._given, *self._minted))
        self.epoch += 1
        self._limits = limits = {key.name: key.limits for key in file_keys if key.limits}
        self._quotas = {name: quota for name, quota in self._quotas.items() if name in limits}
        now = self.clock()
        for name, quota in self._quotas.items():
            quota.change(limits[name], now)
