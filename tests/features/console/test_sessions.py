"""Sessions of the console: one-time tokens, keys, and when a session ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from llamasup.core.auth.api_key import ApiKey, KeyLimits, KeyRing, digest_of
from llamasup.features.console.sessions import (
    IDLE_S,
    MAX_SESSIONS,
    MAX_TOKENS,
    TOKEN_S,
    ConsoleSessions,
    Opened,
    Session,
)

SALT = b"s"
ADMIN = ApiKey("admin", SALT, digest_of(SALT, b"secret"), infers=True, controls=True)
PHONE = ApiKey("phone", SALT, digest_of(SALT, b"phone-secret"))
MONITOR = ApiKey("monitor", SALT, digest_of(SALT, b"monitor-secret"), infers=False, controls=True)


class FakeKeys:
    """The keys of a file, which a test can change, and the minted ones."""

    def __init__(self, *keys: ApiKey) -> None:
        self.file = list(keys)
        self.minted: list[ApiKey] = []
        self.on_look: Callable[[], None] | None = None
        self.epoch = 0

    @property
    def ring(self) -> KeyRing:
        return KeyRing((*self.file, *self.minted))

    def mint(self, key: ApiKey) -> None:
        self.minted.append(key)

    def revoke(self, key: ApiKey) -> None:
        self.minted.remove(key)

    def current(self, key: ApiKey) -> ApiKey | None:
        return next((now for now in self.file if now.digest == key.digest), None)


class World:
    def __init__(self, *keys: ApiKey) -> None:
        self.now_s = 0.0
        self.ended = 0
        self.keys = FakeKeys(*keys)
        self._texts: Iterator[str] = (f"random-{number}" for number in range(10_000))
        self.sessions = ConsoleSessions(
            self.keys, SALT, lambda: self.now_s, lambda: next(self._texts), self._on_closed
        )

    def _on_closed(self) -> None:
        self.ended += 1

    def sign_in(self) -> Opened:
        opened = self.sessions.open_with_token(self.sessions.new_token())
        assert opened is not None
        return opened

    def sign_in_with(self, text: str) -> Opened:
        opened = self.sessions.open_with_key(text)
        assert isinstance(opened, Opened)
        return opened

    def acts_as(self, opened: Opened) -> ApiKey | None:
        return self.sessions.key_of(opened.secret.encode())


@pytest.fixture
def world() -> World:
    return World(ADMIN, PHONE, MONITOR)


# --- tokens


@pytest.mark.check("X17")
def test_token_opens_one_session(world: World) -> None:
    token = world.sessions.new_token()
    assert world.sessions.open_with_token(token) is not None
    assert world.sessions.open_with_token(token) is None
    assert len(world.sessions) == 1


@pytest.mark.parametrize(("after_s", "opens"), [(TOKEN_S - 0.1, True), (TOKEN_S, False)])
def test_token_is_valid_for_a_minute(world: World, after_s: float, opens: bool) -> None:
    token = world.sessions.new_token()
    world.now_s += after_s
    assert (world.sessions.open_with_token(token) is not None) == opens


@pytest.mark.parametrize("token", ["", "x", "random-0 ", "\udcff", "ü"])
def test_unknown_token_opens_no_session_and_spends_no_other(world: World, token: str) -> None:
    valid = world.sessions.new_token()
    assert world.sessions.open_with_token(token) is None
    assert world.sessions.open_with_token(valid) is not None


def test_only_the_newest_tokens_are_kept(world: World) -> None:
    tokens = [world.sessions.new_token() for _ in range(MAX_TOKENS + 1)]
    assert world.sessions.open_with_token(tokens[0]) is None
    assert world.sessions.open_with_token(tokens[1]) is not None


def test_token_of_a_key_gives_the_rights_of_the_key(world: World) -> None:
    opened = world.sessions.open_with_token(world.sessions.new_token(MONITOR))
    assert opened is not None
    assert (world.acts_as(opened), opened.session.inference_key) == (MONITOR, None)
    world.keys.file = []
    assert world.acts_as(opened) is None


@pytest.mark.check("X17")
@pytest.mark.parametrize("now", [[], [replace(ADMIN, controls=False)], [replace(ADMIN, models=("m",))]])
def test_token_ends_with_its_key(world: World, now: list[ApiKey]) -> None:
    token = world.sessions.new_token(ADMIN)
    world.keys.file = now
    assert world.sessions.open_with_token(token) is None


# --- keys


def test_key_with_the_right_control_opens_a_session_under_its_name(world: World) -> None:
    opened = world.sign_in_with("secret")
    assert world.acts_as(opened) == ADMIN


@pytest.mark.check("X4")
@pytest.mark.parametrize(("text", "found"), [("phone-secret", PHONE), ("wrong", None), ("", None)])
def test_other_key_opens_no_session(world: World, text: str, found: ApiKey | None) -> None:
    assert world.sessions.open_with_key(text) == found
    assert len(world.sessions) == 0


def test_key_for_inference_has_the_limits_of_the_key_and_not_its_right_control() -> None:
    limited = replace(ADMIN, limits=KeyLimits(requests_per_minute=1), models=("tiny",))
    world = World(limited)
    session = world.sign_in_with("secret").session
    assert session.inference_key is not None
    (minted,) = world.keys.minted
    assert minted == replace(limited, digest=digest_of(SALT, session.inference_key.encode()), controls=False)
    assert world.keys.ring.find((session.inference_key.encode(),)) is minted


@pytest.mark.check("X4")
def test_key_for_inference_opens_no_session(world: World) -> None:
    text = world.sign_in().session.inference_key
    assert text is not None
    found = world.sessions.open_with_key(text)
    assert isinstance(found, ApiKey)
    assert (found.name, found.controls) == ("console", False)


def test_session_of_a_key_without_inference_has_no_key_for_it(world: World) -> None:
    session = world.sign_in_with("monitor-secret").session
    assert (session.inference_key, session.infers_as, world.keys.minted) == (None, None, [])
    world.sessions.close(session)
    assert world.ended == 1


# --- the end of a session


@pytest.mark.check("X4")
def test_session_is_found_by_its_secret_alone(world: World) -> None:
    first, second = world.sign_in(), world.sign_in()
    assert first.secret != second.secret
    assert world.sessions.find(first.secret.encode()) is first.session
    for secret in ("", first.secret[:-1], first.secret + " ", first.session.inference_key):
        assert not world.sessions.has(str(secret).encode())
        assert world.sessions.key_of(str(secret).encode()) is None
    assert world.acts_as(first) is not None


def test_change_of_the_keys_is_told_once(world: World) -> None:
    world.keys.epoch += 1
    for _ in range(2):
        world.sessions.end_expired()
    assert world.ended == 1


def test_closed_session_gives_no_right_and_its_key_ends(world: World) -> None:
    opened = world.sign_in()
    assert world.sessions.is_open(opened.session)
    world.sessions.close(opened.session)
    assert world.acts_as(opened) is None
    assert not world.sessions.is_open(opened.session)
    assert (world.keys.minted, world.ended) == ([], 1)


def test_unused_session_ends_after_twelve_hours_and_each_use_counts(world: World) -> None:
    used, unused = world.sign_in(), world.sign_in()
    world.now_s += IDLE_S - 1
    assert world.acts_as(used) is not None
    world.now_s += 1
    assert world.keys.on_look is not None
    world.keys.on_look()
    assert (world.acts_as(used) is not None, world.acts_as(unused), world.ended) == (True, None, 1)


@pytest.mark.parametrize("change", ["removed", "renamed", "without control"])
def test_session_ends_when_its_key_changes(world: World, change: str) -> None:
    opened, local = world.sign_in_with("secret"), world.sign_in()
    world.keys.file = {
        "removed": [],
        "renamed": [replace(ADMIN, name="other")],
        "without control": [replace(ADMIN, controls=False)],
    }[change]
    assert world.acts_as(opened) is None
    assert world.acts_as(local) is not None  # it needed no key of the file


def test_one_session_more_than_allowed_ends_the_one_unused_for_the_longest_time(world: World) -> None:
    opened = [world.sign_in() for _ in range(MAX_SESSIONS)]
    world.now_s += 1
    for each in (*opened[:1], *opened[2:]):
        assert world.acts_as(each) is not None
    world.sign_in()
    assert len(world.sessions) == MAX_SESSIONS
    assert world.acts_as(opened[1]) is None


@pytest.mark.check("X13")
def test_opened_session_hides_its_secret(world: World) -> None:
    opened = world.sign_in()
    assert opened.secret not in repr(opened)
    assert isinstance(opened.session, Session)
