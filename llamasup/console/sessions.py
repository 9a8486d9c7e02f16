"""The sessions of the console, and the one-time tokens that open them (docs/console.md).

Everything is in memory, so a restart of llamasup ends all sessions. Only digests of tokens, ids, secrets and
keys are kept. Time and random text are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.auth.keys import ApiKey, KeyRing, digest_of

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

    @property
    def ring(self) -> KeyRing: ...
    def mint(self, key: ApiKey) -> None: ...
    def revoke(self, key: ApiKey) -> None: ...
    def current(self, key: ApiKey) -> ApiKey | None: ...


class Session(Struct, eq=False):
    """``acts_as``: its key, in the control API. ``infers_as``: the key that its pages use for ``/v1/…``, and
    ``inference_key`` its text. ``signed_in_with``: the key of the key file, if one opened the session.
    """

    digest: bytes
    secret_digest: bytes
    acts_as: ApiKey
    infers_as: ApiKey | None
    inference_key: str | None
    signed_in_with: ApiKey | None
    used_s: float


class Opened(Struct, frozen=True):
    """A new session with its ``id``, the value of the cookie, and its ``secret``, which the page keeps."""

    id: str
    secret: str
    session: Session

    def __repr__(self) -> str:
        return "Opened(…)"  # without the secrets


class ConsoleSessions:
    """``clock`` also counts while the machine sleeps. ``random_text`` returns at least 256 random bits, of
    letters, digits, ``_`` and ``-``. ``on_closed`` is called after the end of a session.
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
        self._tokens: list[tuple[bytes, float]] = []  # digest and end, oldest first
        self._sessions: list[Session] = []
        keys.on_look = self.end_expired

    def __len__(self) -> int:
        return len(self._sessions)

    # --- signing in

    def new_token(self) -> str:
        """A token for one ``open_with_token`` within the next ``TOKEN_S`` seconds."""
        token = self._random_text()
        self._tokens = [*self._live_tokens(), (self._digest(token), self._clock() + TOKEN_S)][-MAX_TOKENS:]
        return token

    def open_with_token(self, token: str) -> Opened | None:
        """None if the token is unknown, used or too old."""
        digest = self._digest(token)
        live = self._live_tokens()
        self._tokens = [known for known in live if not compare_digest(known[0], digest)]
        if len(self._tokens) == len(live):
            return None
        return self._open(ApiKey(LOCAL_NAME, b"", b"", infers=True, controls=True), None)

    def open_with_key(self, text: str) -> Opened | ApiKey | None:
        """The key itself if it has not the right `control`; None if the key is unknown."""
        key = self._keys.ring.find((text.encode("utf-8", "surrogateescape"),))
        return self._open(key, key) if key is not None and key.controls else key

    def _open(self, acts_as: ApiKey, signed_in_with: ApiKey | None) -> Opened:
        self.end_expired()
        while len(self._sessions) >= MAX_SESSIONS:
            self.close(min(self._sessions, key=lambda session: session.used_s))
        id_, inference_key = self._random_text(), self._random_text() if acts_as.infers else None
        infers_as = None
        if inference_key is not None:
            # Its name, its limits and its models are those of the key that signed in.
            digest = digest_of(self._salt, inference_key.encode())
            infers_as = replace(acts_as, salt=self._salt, digest=digest, controls=False)
            self._keys.mint(infers_as)
        secret = self._random_text()
        session = Session(
            self._digest(id_),
            self._digest(secret),
            acts_as,
            infers_as,
            inference_key,
            signed_in_with,
            self._clock(),
        )
        self._sessions.append(session)
        return Opened(id_, secret, session)

    # --- sessions

    def find(self, ids: tuple[bytes, ...]) -> Session | None:
        """The session with one of these ids. Takes the same time for valid and invalid ids."""
        self.end_expired()
        found = None
        for id_ in ids:
            digest = digest_of(self._salt, id_)
            for session in self._sessions:
                if compare_digest(session.digest, digest):
                    found = session
        return found

    def find_with_secret(self, ids: tuple[bytes, ...], secret: bytes) -> Session | None:
        """The session with one of these ids; None if it has another secret."""
        session = self.find(ids)
        if session is None or not compare_digest(session.secret_digest, digest_of(self._salt, secret)):
            return None
        return session

    def key_of(self, ids: tuple[bytes, ...], secret: bytes) -> ApiKey | None:
        """Implements ``Sessions`` (``proxy/console_access.py``)."""
        session = self.find_with_secret(ids, secret)
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

    def _live_tokens(self) -> list[tuple[bytes, float]]:
        now = self._clock()
        return [known for known in self._tokens if known[1] > now]

    def _digest(self, secret: str) -> bytes:
        return digest_of(self._salt, secret.encode("utf-8", "surrogateescape"))
