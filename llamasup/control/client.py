"""Asks a running llamasup over its control API: ``ControlClient``; ``AsyncControlClient`` for event loops.

Whatever goes wrong is raised as an error of llamasup's own; one that the other side answered, as what it was
there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast
from urllib.parse import quote

import msgspec

from llamasup.errors import ControlFailed, LlamasupError, NotRunning, UsageInvalid
from llamasup.http.errors import error_from
from llamasup.http.httpx_import import httpx
from llamasup.system.text import INVALID_JSON

__all__ = ["AsyncControlClient", "ControlClient", "Place"]

_PREFIX = "/llamasup/v1"
# The first question makes it load its control application, which takes 0.2 s; a busy machine needs more.
_TIMEOUT_S = 10.0
# Several of the comments that keep a silent stream alive have not come.
_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a llamasup is asked: at its private socket, or at a URL with a key that may control."""

    url: str = "http://localhost"
    socket: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        return self.url if self.socket is None else self.socket


class _ModelRead(msgspec.Struct):
    id: str
    state: str


class _StatusRead(msgspec.Struct):
    """What the ``status`` object of every version has."""

    pid: int
    url: str
    models: list[_ModelRead]


class _Asking:
    """What both clients have in common: no request is sent here."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def _options(self) -> dict[str, Any]:
        place = self.place
        if not httpx.URL(place.url).host:
            raise httpx.UnsupportedProtocol("it names no host")
        headers = {} if place.api_key is None else {"authorization": f"Bearer {place.api_key}"}
        return {
            "base_url": place.url.rstrip("/") + _PREFIX,
            "headers": headers,
            "timeout": _timeout(_TIMEOUT_S),
            "trust_env": False,
        }

    def _trust(self) -> Any:
        """Of the system's certificates, or of ``$SSL_CERT_FILE``. Making it takes 20 ms."""
        if httpx.URL(self.place.url).scheme != "https":  # in small letters, however it was written
            return False
        import ssl

        return ssl.create_default_context()

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        """Errors of httpx as ours."""
        shown = self.place.shown
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UsageInvalid(
                f"{shown!r} is no address of a llamasup: {error}.",
                remedy="Give it as http://127.0.0.1:8080.",
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            untrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
            raise NotRunning(
                f"No llamasup answers at {shown}: {str(error) or 'no answer in time'}.",
                remedy="Name what signs its certificate: SSL_CERT_FILE=FILE."
                if untrusted
                else "Is it running?",
            ) from None
        except httpx.TimeoutException:
            raise ControlFailed(
                f"llamasup at {shown} does not answer {what}.",
                remedy="Is its process stopped, or overloaded?",
            ) from None
        except httpx.HTTPError as error:
            raise ControlFailed(
                f"The connection to llamasup at {shown} broke: {str(error) or type(error).__name__}.",
                remedy="Has it ended?",
            ) from None

    def _answer(self, response: httpx.Response, what: str) -> Any:
        """The JSON of a response that has been read. Raises the error that it stands for."""
        try:
            answered = json.loads(response.content)
        except INVALID_JSON:
            answered = None
        if not response.is_success:
            raise self._error(response.status_code, answered, what)
        try:
            msgspec.convert(answered, _StatusRead if what.endswith("/status") else dict[str, Any])
        except msgspec.ValidationError as error:
            raise ControlFailed(
                f"What runs at {self.place.shown} does not answer {what} as a llamasup does: {error}.",
                remedy="Is it another program?",
            ) from None
        return answered

    def _error(self, status: int, answered: Any, what: str) -> LlamasupError:
        said = answered.get("error") if isinstance(answered, Mapping) else None
        cause = said.get("cause") if isinstance(said, Mapping) else None
        if status in (404, 405) and cause in (None, "no_such_route"):
            return ControlFailed(
                f"What runs at {self.place.shown} does not know {what}.",
                remedy="It is an older llamasup than this one, or another program.",
            )
        return error_from(status, answered)


class ControlClient(_Asking):
    """For one thread. Use it as a context manager.

    Methods raise what stopped the thing that was asked for (ModelUnknown, DoesNotFit, ServerFailed, …),
    NotRunning where nobody answers, NotAllowed where the key is not good enough, and ControlFailed.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        with self._mapped("at all"):
            self._http = httpx.Client(
                transport=httpx.HTTPTransport(uds=place.socket, verify=self._trust()), **self._options()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def status(self) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", self._ask("GET", "/status"))

    def load(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        """Until it serves (without ``wait``: asked for). The model in ``status``, as it is then."""
        return self._change(_of_model(model, "load"), wait=wait)

    def unload(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        """Until its memory is free."""
        return self._change(_of_model(model, "unload"), wait=wait)

    def restart(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        """Until it serves again."""
        return self._change(_of_model(model, "restart"), wait=wait)

    def reload(self, *, wait: bool = True) -> Mapping[str, Any]:
        """What has changed: ids of models (docs/control.md). Raises ConfigInvalid."""
        return self._change("/reload", wait=wait)

    def shutdown(self, *, now: bool = False) -> Mapping[str, Any]:
        """``{"pid","in_flight"}`` at once: it stops from now on. ``now``: without waiting for requests."""
        return cast("Mapping[str, Any]", self._ask("POST", "/shutdown", {"now": int(now)}))

    def events(self) -> Iterator[Mapping[str, Any]]:
        """The state of each model, then all that happens, until llamasup ends (docs/design.md, Events)."""
        with self._streaming("/events", {}, _SILENCE_S) as response:
            for line in response.iter_lines():
                if (event := _event_of(line)) is not None:
                    yield event

    def log(self, model: str, *, lines: int = 200, follow: bool = False) -> Iterator[bytes]:
        """The last lines of llama-server's own log, in pieces; with ``follow`` those to come, too."""
        path, query, silence_s = _log_request(model, lines, follow=follow)
        with self._streaming(path, query, silence_s) as response:
            yield from response.iter_bytes()

    def _change(self, path: str, *, wait: bool) -> Mapping[str, Any]:
        answer = self._ask("POST", path, {"wait": int(wait)}, None if wait else _TIMEOUT_S)
        return cast("Mapping[str, Any]", answer)

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, int] | None = None,
        silence_s: float | None = _TIMEOUT_S,
    ) -> Any:
        what = f"{method} {_PREFIX}{path}"
        with self._mapped(what):
            response = self._http.request(method, path, params=query, timeout=_timeout(silence_s))
        return self._answer(response, what)

    @contextmanager
    def _streaming(
        self, path: str, query: Mapping[str, int], silence_s: float | None
    ) -> Iterator[httpx.Response]:
        what = f"GET {_PREFIX}{path}"
        with (
            self._mapped(what),
            self._http.stream("GET", path, params=query, timeout=_timeout(silence_s)) as response,
        ):
            if not response.is_success:
                response.read()
                self._answer(response, what)
            yield response


class AsyncControlClient(_Asking):
    """``ControlClient`` for an event loop. Use it as an asynchronous context manager."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        with self._mapped("at all"):
            self._http = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=place.socket, verify=self._trust()), **self._options()
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def status(self) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", await self._ask("GET", "/status"))

    async def load(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        return await self._change(_of_model(model, "load"), wait=wait)

    async def unload(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        return await self._change(_of_model(model, "unload"), wait=wait)

    async def restart(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        return await self._change(_of_model(model, "restart"), wait=wait)

    async def reload(self, *, wait: bool = True) -> Mapping[str, Any]:
        return await self._change("/reload", wait=wait)

    async def shutdown(self, *, now: bool = False) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", await self._ask("POST", "/shutdown", {"now": int(now)}))

    async def events(self) -> AsyncIterator[Mapping[str, Any]]:
        async with self._streaming("/events", {}, _SILENCE_S) as response:
            async for line in response.aiter_lines():
                if (event := _event_of(line)) is not None:
                    yield event

    async def log(self, model: str, *, lines: int = 200, follow: bool = False) -> AsyncIterator[bytes]:
        path, query, silence_s = _log_request(model, lines, follow=follow)
        async with self._streaming(path, query, silence_s) as response:
            async for piece in response.aiter_bytes():
                yield piece

    async def _change(self, path: str, *, wait: bool) -> Mapping[str, Any]:
        answer = await self._ask("POST", path, {"wait": int(wait)}, None if wait else _TIMEOUT_S)
        return cast("Mapping[str, Any]", answer)

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, int] | None = None,
        silence_s: float | None = _TIMEOUT_S,
    ) -> Any:
        what = f"{method} {_PREFIX}{path}"
        with self._mapped(what):
            response = await self._http.request(method, path, params=query, timeout=_timeout(silence_s))
        return self._answer(response, what)

    @asynccontextmanager
    async def _streaming(
        self, path: str, query: Mapping[str, int], silence_s: float | None
    ) -> AsyncIterator[httpx.Response]:
        what = f"GET {_PREFIX}{path}"
        with self._mapped(what):
            async with self._http.stream("GET", path, params=query, timeout=_timeout(silence_s)) as response:
                if not response.is_success:
                    await response.aread()
                    self._answer(response, what)
                yield response


def _timeout(read_s: float | None) -> httpx.Timeout:
    """None: as long as it takes, which is what a load is given."""
    return httpx.Timeout(_TIMEOUT_S, read=read_s)


def _of_model(model: str, what: str) -> str:
    name = quote(model, safe="")
    # What is made of dots alone would be taken for a way up.
    return f"/models/{name if name.strip('.') else name.replace('.', '%2E')}/{what}"


def _log_request(model: str, lines: int, *, follow: bool) -> tuple[str, Mapping[str, int], float | None]:
    """Path, query, and how long it may be silent."""
    return _of_model(model, "logs"), {"lines": lines, "follow": int(follow)}, None if follow else _TIMEOUT_S


def _event_of(line: str) -> Mapping[str, Any] | None:
    """Of one line of server-sent events; comments and blank lines are none."""
    if not line.startswith("data: "):
        return None
    try:
        event = json.loads(line.removeprefix("data: "))
    except INVALID_JSON as error:
        raise ControlFailed(
            f"llamasup sent an invalid event: {error}.",
            remedy="Check that the address is that of a llamasup.",
        ) from None
    return event if isinstance(event, dict) else None
