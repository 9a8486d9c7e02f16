"""The generations of a rig's only model, reported in the order of a real runner, and its queue."""

from __future__ import annotations

from llamasup.core.http.heads import HttpError
from llamasup.core.queueing.endpoint import Endpoint, generation_ended
from tests.core.proxy.rig import CHAT, Rig, Wire, post

LOADING = HttpError(503, "Loading model", cause="loading", retry_after_s=1.0, queueable=True)
FAILED = HttpError(503, "it ran out of memory", cause="out_of_memory", remedy="use a smaller context")
STOPPING = HttpError(503, "The server is stopping", cause="stopping")


def make_unavailable(rig: Rig, why: HttpError) -> None:
    """Let no generation serve, for the reason ``why``."""

    def change() -> None:
        rig.backend.unavailable = why
        rig.backend.waiting.changed()

    rig.call(change)


def end_generation(rig: Rig, why: HttpError = LOADING, *, crashed: bool = False) -> None:
    """End the generation and its requests."""
    make_unavailable(rig, why)
    ended = generation_ended("llama-server was killed")
    rig.call(lambda: rig.backend.endpoint.close(ended, crashed=crashed))


def start_generation(rig: Rig) -> Endpoint:
    """Make the next generation ready at the same address."""
    old = rig.backend.endpoint
    new = Endpoint(old.model, old.generation + 1, old.address)
    new.on_permit_free = rig.backend.waiting.permit_freed

    def change() -> None:
        rig.backend.endpoint = new
        rig.backend.unavailable = None
        rig.backend.waiting.changed()

    rig.call(change)
    return new


def await_queued(rig: Rig, count: int) -> None:
    """Wait until ``count`` requests are queued."""
    while rig.call(lambda: len(rig.backend.waiting)) != count:
        pass


def send_chat(rig: Rig, body: bytes, path: bytes = CHAT) -> Wire:
    return rig.send(post(path, body))
