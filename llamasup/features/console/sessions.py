"""The sessions of the console, and the one-time tokens that open them (docs/console.md).

Everything is in memory, so a restart of llamasup ends all sessions. Only digests of tokens, secrets and
keys are kept. Time and random text are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.auth.api_key import ApiKey, KeyRing, digest_of

__all__ = ["IDLE_S", "MAX_SESSIONS", "MAX_TOKENS", "TOKEN_S", "ConsoleSessions", "Opened", "Session"]

TOKEN_S = 60.0
IDLE_S = 12 * 3600.0
# Each is a browser; one more ends the session that was unused for the longest time.
MAX_SESSIONS = 32
MAX_TOKENS = 16

LOCAL_NAME = "console"
"""The name, in logs and usage, of a session that `llamasup ui` opened."""


class SessionKeys(Protocol):
    """The API keys (``Keys``)."""

    on_look: Callable[[], None] | None
    epoch: int

    @property
    def ring(self) -> KeyRing: ...
    def mint(self, key: ApiKey) -> None: ...
    def revoke(self, key: ApiKey) -> None: ...
    def current(self, key: ApiKey) -> ApiKey | None: ...


class Session(Struct, eq=False):
    """A session. ``digest`` is that of its secret. ``acts_as``: its key, in the control API. ``infers_as``:
    the key that its page uses for ``/v1/…``, and ``inference_key`` its text. ``signed_in_with``: the key of
    the key file, if one opened the session.
    """

    digest: bytes
    acts_as: ApiKey
    infers_as: ApiKey | None
    inference_key: str | None
    signed_in_with: ApiKey | None
    used_s: float


class _Token(Struct, frozen=True):
    digest: bytes
    ends_s: float
    key: ApiKey | None


class Opened(Struct, frozen=True):
    """A new session with its ``secret``, which the page keeps."""

    secret: str
    session: Session

    def __repr__(self) -> str:
        return "Opened(…)"  # without the secret


class ConsoleSessions:
    """The open sessions. ``clock`` also counts while the machine sleeps. ``random_text`` returns at least 256
    random bits, of letters, digits, ``_`` and ``-``. ``on_closed`` is called after the end of a session or of
    a key.
    """

    def __init__(
        self,
        keys: SessionKeys,
        salt: bytes,
        clock: Callable[[], float],
        random_text: Callable[[], str],
        on_closed: Callable[[], None],
    ) -> None:
        self._keys = keys
        self._salt = salt
        self._clock = clock
        self._random_text = random_text
        self._on_closed = on_closed
        self._tokens: list[_Token] = []  # oldest first
        self._sessions: list[Session] = []
        self._epoch = keys.epoch
        keys.on_look = self.end_expired

    def __len__(self) -> int:
        return len(self._sessions)

    # --- signing in

    def new_token(self, key: ApiKey | None = None) -> str:
        """Make a token for one ``open_with_token`` within the next ``TOKEN_S`` seconds.

        ``key``: the session gets no more rights than this key, and ends with it. None: the token is for the
        user of this machine.
        """
        token = self._random_text()
        made = _Token(self._digest(token), self._clock() + TOKEN_S, key)
        self._tokens = [*self._live_tokens(), made][-MAX_TOKENS:]
        return token

    def open_with_token(self, token: str) -> Opened | None:
        """Open a session. None if the token is unknown, used or too old, or if its key was changed or
        removed.
        """
        digest = self._digest(token)
        live = self._live_tokens()
        found = next((known for known in live if compare_digest(known.digest, digest)), None)
        if found is None:
            return None
        self._tokens = [known for known in live if known is not found]
        key = found.key
        if key is None:
            return self._open(ApiKey(LOCAL_NAME, b"", b"", infers=True, controls=True), None)
        return self._open(key, key) if self._keys.current(key) == key else None

    def open_with_key(self, text: str) -> Opened | ApiKey | None:
        """Returns a session, the key if it lacks the right `control`, or None if the key is unknown."""
        key = self._keys.ring.find((text.encode("utf-8", "surrogateescape"),))
        return self._open(key, key) if key is not None and key.controls else key

    def _open(self, acts_as: ApiKey, signed_in_with: ApiKey | None) -> Opened:
        self.end_expired()
        while len(self._sessions) >= MAX_SESSIONS:
            self.close(min(self._sessions, key=lambda session: session.used_s))
        inference_key = self._random_text() if acts_as.infers else None
        infers_as = None
        if inference_key is not None:
            # Its name, its limits and its models are those of the key that signed in.
            digest = digest_of(self._salt, inference_key.encode())
            infers_as = replace(acts_as, salt=self._salt, digest=digest, controls=False, is_node=False)
            self._keys.mint(infers_as)
        secret = self._random_text()
        session = Session(
            self._digest(secret), acts_as, infers_as, inference_key, signed_in_with, self._clock()
        )
        self._sessions.append(session)
        return Opened(secret, session)

    # --- sessions

    def find(self, secret: bytes) -> Session | None:
        """Return the session with this secret. Takes the same time for valid and invalid secrets."""
        self.end_expired()
        found, digest = None, digest_of(self._salt, secret)
        for session in self._sessions:
            if compare_digest(session.digest, digest):
                found = session
        return found

    def has(self, secret: bytes) -> bool:
        """Implements ``Sessions`` (``proxy/console_access.py``)."""
        return self.find(secret) is not None

    def key_of(self, secret: bytes) -> ApiKey | None:
        """Implements ``Sessions`` (``proxy/console_access.py``)."""
        session = self.find(secret)
        if session is None:
            return None
        session.used_s = self._clock()
        return session.acts_as

    def is_open(self, session: Session) -> bool:
        self.end_expired()
        return session in self._sessions

    def close(self, session: Session) -> None:
        """End the session, and its key for inference."""
        self._sessions.remove(session)
        if session.infers_as is not None:
            self._keys.revoke(session.infers_as)
        self._on_closed()

    def end_expired(self) -> None:
        """End the sessions that were not used for ``IDLE_S``, and those whose key was changed or removed."""
        oldest_s = self._clock() - IDLE_S
        for session in tuple(self._sessions):
            key = session.signed_in_with
            if session.used_s <= oldest_s or (key is not None and self._keys.current(key) != key):
                self.close(session)
        if self._epoch != self._keys.epoch:
            self._epoch = self._keys.epoch
            self._on_closed()

    def _live_tokens(self) -> list[_Token]:
        now = self._clock()
        return [known for known in self._tokens if known.ends_s > now]

    def _digest(self, secret: str) -> bytes:
        return digest_of(self._salt, secret.encode("utf-8", "surrogateescape"))
