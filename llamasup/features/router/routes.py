"""The paths of llama.cpp's router that load and unload models, and report it.

An answer does not wait for the load or the unload, as that of a router. The proxy has checked who asks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamasup.core.control.interface import ControlTarget, Host
from llamasup.core.control.json_body import json_answer, read_body
from llamasup.core.control.private_socket import client_of, limits_of
from llamasup.core.control.streams import Stream, Streams, event_stream
from llamasup.core.http.errors import type_of
from llamasup.core.models.access import allows
from llamasup.core.system.text import json_text
from llamasup.errors import ModelUnknown, NotAllowed
from llamasup.features.router.events import UNLOADED, Listed, RouterEvents, status_of

_MOST: Final = 32
"""Streams at a time. They leave those of the control API to operators."""
_MOST_OF_ONE: Final = 8
"""Streams of one key: the tabs of a browser."""


class _Asked(msgspec.Struct):
    model: Any = None


class _Routes:
    def __init__(self, target: ControlTarget) -> None:
        self._target = target
        self._streams = Streams(_MOST, "streams of /models/sse", _MOST_OF_ONE)

    async def change(self, request: Request) -> Response:
        loads = request.url.path.endswith("/load")
        model, state = await self._asked(request)
        if state is None:
            return _refusal(404 if loads else 400, "model is not found")
        if loads != (status_of(state) == UNLOADED):
            return _refusal(400, f"model is {'already' if loads else 'not'} running")
        work = partial(self._target.load if loads else self._target.unload, model)
        await request.app.state.in_background(work, f"control{request.url.path}")
        return json_answer({"success": True})

    async def events(self, request: Request) -> Response:
        state, streams, client = request.app.state, self._streams, client_of(request.headers)
        if streams not in state.streams:
            state.streams.append(streams)
        streams.enter(client)
        frames = event_stream(self._target, streams, is_open=state.is_open(request))
        translated = self._translated(frames, limits_of(request.headers))
        return Stream(streams, translated, "text/event-stream", client=client)

    async def _asked(self, request: Request) -> tuple[str, str | None]:
        """The id of the model that the body names, and its state; None if it is unknown."""
        asked = (await read_body(request, _Asked)).model
        name = asked if isinstance(asked, str) else ""
        limits = limits_of(request.headers)
        try:
            found = self._target.why(name)
        except ModelUnknown:
            found = {"model": name, "state": None}
        if limits and not allows(limits, self._names(found["model"])):
            raise NotAllowed("This key may not use the model.", remedy="Use a key that may use it.")
        return found["model"], found["state"]

    async def _translated(
        self, frames: AsyncGenerator[bytes], limits: Sequence[str]
    ) -> AsyncGenerator[bytes]:
        events = RouterEvents(self._listed)
        try:
            async for frame in frames:
                if not frame.startswith(b"data: "):
                    yield frame
                    continue
                for event in events.translated(msgspec.json.decode(frame[6:])):
                    named = event["model"]
                    if not limits or named == "*" or allows(limits, self._names(named)):
                        yield f"data: {json_text(event)}\n\n".encode()
        finally:
            await frames.aclose()

    # --- models

    def _listed(self, model: str) -> Listed | None:
        try:
            return self._target.listed(model)
        except ModelUnknown:
            return None

    def _names(self, model: str) -> Sequence[str]:
        listed = self._listed(model)
        return (model,) if listed is None else (model, *listed["aliases"])


def _refusal(status: int, message: str) -> Response:
    error = {"code": status, "message": message, "type": type_of(status)}
    return json_answer({"error": error}, status)


def routes(host: Host, target: ControlTarget) -> Sequence[Route]:
    paths = _Routes(target)
    return [
        Route("/models/load", paths.change, methods=["POST"]),
        Route("/models/unload", paths.change, methods=["POST"]),
        Route("/models/sse", paths.events, methods=["GET"]),
    ]
