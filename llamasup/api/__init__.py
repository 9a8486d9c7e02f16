"""llamasup in a Python program.

    async with llamasup.serve("model.gguf") as server:
        answer = await server.client.post("/v1/chat/completions", json={…})

    with llamasup.serve("model.gguf") as server:
        answer = server.client.post("/v1/chat/completions", json={…})

It serves like ``llamasup serve``, with the same proxy, supervision and eviction, at its own address and in
this process (``with``: in its own thread). Signal handlers are not changed. docs/python.md has examples.
"""

from llamasup.api.arguments import ModelArguments
from llamasup.api.async_server import AsyncServer
from llamasup.api.events import AsyncEvents, Events
from llamasup.api.server import Server
from llamasup.api.serving import Serving, serve

__all__ = ["AsyncEvents", "AsyncServer", "Events", "ModelArguments", "Server", "Serving", "serve"]
