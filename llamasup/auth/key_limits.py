"""The keys as they are now, and what each has used of its limits. One for all of a proxy's sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from llamasup.auth.key_source import PROCESS_SALT, KeyFile
from llamasup.auth.keys import ApiKey, KeyLimits, KeyRing, plain_keys
from llamasup.auth.quota import Quota
from llamasup.http.heads import HttpError

__all__ = ["CountedRequest", "Keys"]


class CountedRequest(Protocol):
    """The parts of a request that the limits of a key count. ``Keys`` sets ``quota`` and ``counted``."""

    quota: Quota | None
    """The quota of its key, which the request has entered and must leave."""
    counted: int
    """How many of its jobs the quota counts."""

    @property
    def key(self) -> ApiKey | None: ...
    @property
    def needs_permit(self) -> bool: ...
    @property
    def jobs(self) -> int: ...


class Keys:
    """``epoch`` changes with the keys: what was decided by those of another epoch is to be decided anew.

    ``needed``: nobody comes in without one, also while the last of the file's is revoked.
    """

    __slots__ = ("_file", "_given", "_limits", "_quotas", "clock", "epoch", "needed", "ring")

    def __init__(self, file: KeyFile | None, given: Iterable[str], clock: Callable[[], float]) -> None:
        """``file`` says what its keys may; those that are ``given`` may infer."""
        self.clock = clock
        self._file = file
        self._given = plain_keys(given, PROCESS_SALT)
        self.needed = self._file is not None or bool(self._given)
        self._limits: dict[str, KeyLimits] = {}  # by name, of keys that have any
        self._quotas: dict[str, Quota] = {}  # of those, the ones that have been used
        self.epoch = 0
        self.ring = KeyRing(())
        self._renew()

    def look(self) -> None:
        """Take over what the file of keys says now. Costs a stat() if it says nothing new."""
        if self._file is not None and self._file.changed():
            self._renew()

    def enter(self, request: CountedRequest) -> HttpError | None:
        """Count a request in, or say that its key has had too many. Only inference is limited.

        Once: one whose generation ended in the middle of its body comes again when that is whole.
        """
        key = request.key
        if key is None or not key.limits or request.quota is not None or not request.needs_permit:
            return None
        limits = self._limits.get(key.name)
        if limits is None:
            return None  # the key went while the body came: its last request
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
        """The request is over, and cost ``tokens``. ``refund``: do not count it as a request of its key."""
        quota, request.quota = request.quota, None
        if quota is not None:
            now = self.clock()
            quota.leave(tokens, now, request.counted)
            if refund:
                quota.refund(now)

    def _renew(self) -> None:
        """A key that is still there by its name has used what it has used, whatever its limits are now."""
        of_file = self._file.keys if self._file is not None else ()
        self.ring = KeyRing((*of_file, *self._given))  # of a key that is given twice, the file says more
        self.epoch += 1
        self._limits = limits = {key.name: key.limits for key in of_file if key.limits}
        self._quotas = {name: quota for name, quota in self._quotas.items() if name in limits}
        now = self.clock()
        for name, quota in self._quotas.items():
            quota.change(limits[name], now)
