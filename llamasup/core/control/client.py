"""The client of the control API of a running llamasup.

Every failure is raised as an error of llamasup. An error that the server answers is raised here as the class
that the server raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast
from urllib.parse import quote

import msgspec
from msgspec import Struct

from llamasup.core.control.private_socket import Reached, reach
from llamasup.core.http.errors import error_from
from llamasup.core.http.httpx_client import TRUST_REMEDY, httpx, is_untrusted, trusted
from llamasup.core.http.sse import Lines
from llamasup.core.pool.why.recording import MAX_DECISIONS
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, UsageInvalid

_PREFIX = "/llamasup/v1"
# The first request makes the server load its control application, which takes 0.2 s; longer if it is busy.
_TIMEOUT_S = 10.0
# Four keepalive comments of an event stream are missing.
_SILENCE_S = 60.0


class ControlAddress(Struct, frozen=True):
    """The address of a llamasup: its private socket, or its URL and a key with control rights."""

    url: str = "http://localhost"
    socket: str | None = None
    api_key: str | None = None

    def __repr__(self) -> str:
        return f"ControlAddress({self.shown!r})"  # without the key

    @property
    def shown(self) -> str:
        return self.url if self.socket is None else self.socket


class _ModelRead(msgspec.Struct):
    id: str
    state: str


class StatusRead(msgspec.Struct):
    """The fields that the ``status`` object of every version has."""

    pid: int
    url: str
    models: list[_ModelRead]
    version: str = ""


class ControlClient:
    """A client for one thread. Use it as a context manager.

    Methods raise the error that stopped the request (ModelUnknown, DoesNotFit, ServerFailed, …), NotRunning
    if no llamasup answers, NotAllowed if the key has too few rights, and ControlFailed.
    """

    def __init__(self, address: ControlAddress) -> None:
        self.address = address
        with mapped_errors(self.address.shown, "the request"):
            reached = self._reached()
            if not httpx.URL(reached.url).host:
                raise httpx.UnsupportedProtocol("the host is missing")
            self._http = httpx.Client(
                transport=httpx.HTTPTransport(uds=reached.uds, verify=trusted(self.address.url)),
                base_url=reached.url.rstrip("/"),
                headers=httpx.Headers(reached.headers, encoding="utf-8"),
                timeout=_timeout(_TIMEOUT_S),
                trust_env=False,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def status(self) -> Mapping[str, Any]:
        return self._request("GET", "/status")

    def models(self) -> Sequence[Mapping[str, Any]]:
        """The models of ``/v1/models``, which a key of a client may see. Not over the private socket."""
        entries = self._request("GET", "/v1/models", prefix="").get("data")
        try:
            return msgspec.convert(entries, list[dict[str, Any]])
        except msgspec.ValidationError:
            raise ControlFailed(
                f"The program at {self.address.shown} does not answer GET /v1/models with a list of models.",
                remedy="Check that the address is that of a llamasup.",
            ) from None

    def answer_lines(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Iterator[str]:
        """The lines of a streamed answer of a model, as a client gets them. Not over the private socket."""
        with self._streaming("POST", path, timeout_s, json=body) as response:
            lines = Lines()
            for data in response.iter_bytes():
                yield from lines.add(data)
            yield from lines.rest()

    def why(self, model: str) -> Mapping[str, Any]:
        """The reasons for the state of the model, in sentences (docs/control.md). Raises ModelUnknown."""
        return self._request("GET", _of_model(model, "why"))

    def decisions(self, limit: int = MAX_DECISIONS) -> Mapping[str, Any]:
        """The last decisions about all models, the newest first."""
        return self._request("GET", "/decisions", {"limit": limit})

    def requests(self, ended: int = 0) -> Mapping[str, Any]:
        """The requests in flight, and the last ``ended`` finished ones (docs/control.md)."""
        return self._request("GET", "/requests", {"ended": ended})

    def cancel(self, request_id: str) -> Mapping[str, Any]:
        """Cancel a request; returns ``{"cancelled": […]}``. Raises RequestUnknown."""
        return self._request("DELETE", f"/requests/{_segment(request_id)}")

    def usage(self, by: str = "model", since: str | None = None) -> Mapping[str, Any]:
        """The ``usage`` object of docs/design.md. Raises UsageInvalid."""
        query = {"by": by} if since is None else {"by": by, "since": since}
        return self._request("GET", "/usage", query)

    def console_token(self) -> Mapping[str, Any]:
        """A token that signs one browser in to the web console: ``{"token","url","expires_s"}``."""
        return self._request("POST", "/console/token")

    def load(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        """Returns when the model serves (without ``wait``: at once), with its entry of ``status``."""
        return self._change(_of_model(model, "load"), wait=wait)

    def unload(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        """Returns when its memory is free."""
        return self._change(_of_model(model, "unload"), wait=wait)

    def restart(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        """Returns when the model serves again."""
        return self._change(_of_model(model, "restart"), wait=wait)

    def reload(self, *, wait: bool = True) -> Mapping[str, Any]:
        """The changes: ids of models (docs/control.md). Raises ConfigInvalid."""
        return self._change("/reload", wait=wait)

    def upgrade(self, runtime: str, *, dry_run: bool = False) -> Mapping[str, Any]:
        """Returns when all models have the build (docs/upgrade.md). Raises BuildRefused."""
        body = {"runtime": runtime, "dry_run": dry_run}
        return self._request("POST", "/upgrade", silence_s=None, body=body)

    def upgrade_status(self) -> Mapping[str, Any]:
        """The last upgrade, or the one under way."""
        return self._request("GET", "/upgrade")

    def shutdown(self, *, now: bool = False) -> Mapping[str, Any]:
        """Begin to stop; returns ``{"pid","in_flight"}`` at once. ``now``: without waiting for requests."""
        return self._request("POST", "/shutdown", {"now": int(now)})

    def events(self) -> Iterator[Mapping[str, Any]]:
        """The state of each model, then every event until llamasup ends (docs/design.md, Events)."""
        with self._streaming("GET", f"{_PREFIX}/events", _SILENCE_S) as response:
            for line in response.iter_lines():
                if (event := _event_of(line)) is not None:
                    yield event

    def log(self, model: str | None, *, lines: int = 200, follow: bool = False) -> Iterator[bytes]:
        """The last lines of llama-server's log, in chunks; with ``follow`` also the lines to come.

        Without a model: those that llamasup has said itself.
        """
        query = {"lines": lines, "follow": int(follow)}
        path = _PREFIX + ("/logs" if model is None else _of_model(model, "logs"))
        with self._streaming("GET", path, None if follow else _TIMEOUT_S, params=query) as response:
            yield from response.iter_bytes()

    def _change(self, path: str, *, wait: bool) -> Mapping[str, Any]:
        return self._request("POST", path, {"wait": int(wait)}, None if wait else _TIMEOUT_S)

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, int | str] | None = None,
        silence_s: float | None = _TIMEOUT_S,
        body: Mapping[str, Any] | None = None,
        *,
        prefix: str = _PREFIX,
    ) -> dict[str, Any]:
        path, timeout = prefix + path, _timeout(silence_s)
        with mapped_errors(self.address.shown, what := f"{method} {path}"):
            response = self._http.request(method, path, params=query, timeout=timeout, json=body)
        return self._answer(response, what)

    @contextmanager
    def _streaming(
        self, method: str, path: str, silence_s: float | None, **sent: Any
    ) -> Iterator[httpx.Response]:
        what = f"{method} {path}"
        with (
            mapped_errors(self.address.shown, what),
            self._http.stream(method, path, timeout=_timeout(silence_s), **sent) as response,
        ):
            if not response.is_success:
                response.read()
                self._answer(response, what)
            yield response

    def _reached(self) -> Reached:
        if self.address.socket is None:
            key = self.address.api_key
            return Reached(self.address.url, None, {} if key is None else {"authorization": f"Bearer {key}"})
        try:
            return reach(self.address.socket)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error

    def _answer(self, response: httpx.Response, what: str) -> dict[str, Any]:
        """The JSON of a complete response. Raises the error that it contains."""
        try:
            answered = json.loads(response.content)
        except INVALID_JSON:
            answered = None
        if not response.is_success:
            raise self._error(response.status_code, answered, what)
        try:
            msgspec.convert(answered, StatusRead if what.endswith("/status") else dict[str, Any])
        except msgspec.ValidationError as error:
            raise ControlFailed(
                f"The program at {self.address.shown} does not answer {what} like a llamasup: {error}.",
                remedy="Check that the address is that of a llamasup.",
            ) from None
        return cast("dict[str, Any]", answered)

    def _error(self, status: int, answered: Any, what: str) -> LlamasupError:
        error = answered.get("error") if isinstance(answered, Mapping) else None
        cause = error.get("cause") if isinstance(error, Mapping) else None
        if status in (404, 405) and cause in (None, "no_such_route"):
            return ControlFailed(
                f"The program at {self.address.shown} does not know {what}.",
                remedy="It is an older version of llamasup, or another program.",
            )
        failed = error_from(status, answered)
        if cause == "api_key" and self.address.api_key is None:
            failed.remedy = "Give a key with --api-key-file or $LLAMASUP_API_KEY."
        return failed


@contextmanager
def mapped_errors(shown: str, what: str) -> Iterator[None]:
    """Raise errors of httpx as errors of llamasup. ``shown``: the address; ``what``: the request."""
    try:
        yield
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageInvalid(
            f"{shown!r} is not a valid URL of a llamasup: {error}.",
            remedy="Write it like http://127.0.0.1:8080.",
        ) from None
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise NotRunning(
            f"No llamasup answers at {shown}: {str(error) or 'timed out'}.",
            remedy=TRUST_REMEDY if is_untrusted(error) else "Check the URL, and whether llamasup runs there.",
        ) from None
    except httpx.TimeoutException:
        raise ControlFailed(
            f"llamasup at {shown} does not answer {what}.",
            remedy="Check whether its process is suspended or overloaded.",
        ) from None
    except httpx.HTTPError as error:
        raise ControlFailed(
            f"The connection to llamasup at {shown} broke: {str(error) or type(error).__name__}.",
            remedy="Check whether it has exited.",
        ) from None


def _timeout(read_s: float | None) -> httpx.Timeout:
    """The timeout of a request. ``read_s`` None: no limit, as for a load."""
    return httpx.Timeout(_TIMEOUT_S, read=read_s)


def _of_model(model: str, what: str) -> str:
    return f"/models/{_segment(model)}/{what}"


def _segment(name: str) -> str:
    """A segment of a path. A name of dots alone would be read as a relative path."""
    quoted = quote(name, safe="")
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")


def _event_of(line: str) -> Mapping[str, Any] | None:
    """The event in one line of server-sent events; None for comments and blank lines."""
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
