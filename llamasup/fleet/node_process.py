"""One llamasup on a node, as a child of the Ray actor: it has its own event loop, and ends with the actor.

It is the ordinary ``llamasup serve --sidecar`` with a config of one model. This module knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llamasup.errors import ServerFailed
from llamasup.fleet.certificates import authority, node_certificate
from llamasup.fleet.messages import NodeLoad
from llamasup.fleet.node_config import NodeFiles, node_config
from llamasup.fleet.secret import control_key, node_key
from llamasup.http.httpx_import import httpx

__all__ = ["NodeProcess", "NodeSpec"]

_PREFIX = "llamasup-fleet-"
_ANSWER_S = 5.0  # of the control API on this machine


class NodeSpec(Struct, frozen=True):
    """What each node of one model gets. ``written``: the fleet's config as JSON; ``keys``: lines of a key
    file with the keys that clients may use at a node.
    """

    model: str
    source: str
    aliases: tuple[str, ...]
    written: bytes
    folder: str
    secret: str
    keys: str = ""
    drain_timeout_s: float = 60.0


class NodeProcess:
    """``host``: the address of this node for the fronts."""

    def __init__(self, spec: NodeSpec, host: str, environ: Mapping[str, str] = os.environ) -> None:
        self._spec = spec
        self._host = host
        self._environ = environ
        self._folder: Path | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._failure = ""
        self._client: httpx.AsyncClient | None = None
        self.url = ""

    async def start(self) -> None:
        """Wait until the model serves. Raises ServerFailed."""
        _remove_left_behind()
        config = await asyncio.to_thread(self._write_files)
        command = (sys.executable, "-m", "llamasup", "serve", "--sidecar")
        arguments = ("--config", str(config), "--host", self._host, "--port", "0")
        self._child = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.PIPE,  # it stops when the actor ends, and so closes it
            stdout=asyncio.subprocess.PIPE,
            env={**self._environ, "LLAMASUP_API_KEY": ""},
            limit=1 << 20,
        )
        self._reader = asyncio.get_running_loop().create_task(self._read_events(self._child), name="events")
        try:
            self.url = await self._started
        except BaseException:
            await self.stop()
            raise
        trust = ssl.create_default_context(cadata=authority(self._spec.secret))
        # Without a key for all requests: those of clients have their own, or are refused.
        self._client = httpx.AsyncClient(base_url=self.url, verify=trust, timeout=_ANSWER_S, trust_env=False)

    def _write_files(self) -> Path:
        spec = self._spec
        folder = self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        certificate = node_certificate(spec.secret, self._host)
        names = {name: str(folder / name) for name in ("keys", "certificate.pem", "key.pem")}
        lines = (
            f"{node_key(spec.secret)} name=fleet priority=high",
            f"{control_key(spec.secret)} name=fleet-node rights=inference,control",
            spec.keys,
        )
        _write(folder / "keys", "\n".join(lines).encode())
        _write(folder / "certificate.pem", certificate.chain)
        _write(folder / "key.pem", certificate.private_key)
        config = node_config(
            msgspec.json.decode(spec.written),
            folder=spec.folder,
            model=spec.model,
            source=spec.source,
            aliases=spec.aliases,
            files=NodeFiles(names["keys"], names["certificate.pem"], names["key.pem"]),
        )
        _write(folder / "config.yaml", config)
        return folder / "config.yaml"

    async def _read_events(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            with contextlib.suppress(msgspec.DecodeError):
                self._note(msgspec.json.decode(line))
        code = await child.wait()
        if not self._started.done():
            message = (
                self._failure
                or f"llamasup ended with exit code {code}; its messages are in the log of the actor"
            )
            self._started.set_exception(ServerFailed(message, cause="node_failed", exit_code=code or 75))

    def _note(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"event": "ready", "url": str(url)} if not self._started.done():
                self._started.set_result(url)
            case {"event": "failed", "message": str(message), "remedy": str(remedy)}:
                self._failure = f"{message} {remedy}".strip()
                if not self._started.done():
                    self._started.set_exception(
                        ServerFailed(self._failure, cause="node_failed", exit_code=75)
                    )

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.returncode

    async def check(self) -> None:
        """Raise ServerFailed if this node has to be replaced: llamasup has ended or given up.

        llamasup itself restarts a llama-server that crashed or hangs, so that is no reason.
        """
        if self.exit_code is not None:
            raise ServerFailed(
                f"llamasup ended with exit code {self.exit_code}.", cause="node_failed", exit_code=75
            )
        model = await self._model()
        if model["state"] == "failed":
            raise ServerFailed(
                self._failure or f"The model {self._spec.model!r} has failed.",
                cause="node_failed",
                exit_code=75,
            )

    async def load(self) -> NodeLoad:
        """The requests of the model. Raises httpx.HTTPError."""
        model = await self._model()
        return NodeLoad(
            slots=model.get("slots") or 1, busy=model.get("in_flight") or 0, queued=model.get("queued") or 0
        )

    async def _model(self) -> Mapping[str, Any]:
        assert self._client is not None
        key = {"authorization": f"Bearer {control_key(self._spec.secret)}"}
        answer = await self._client.get("/llamasup/v1/status", headers=key)
        answer.raise_for_status()
        models: dict[str, Mapping[str, Any]] = {model["id"]: model for model in answer.json()["models"]}
        return models[self._spec.model]

    async def stream(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """Forward one request. Yields the status with the headers, then the chunks of the body."""
        assert self._client is not None
        request = self._client.build_request(method, path, headers=headers, content=body, timeout=None)
        answer = await self._client.send(request, stream=True)
        try:
            yield answer.status_code, dict(answer.headers)
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            await answer.aclose()

    async def stop(self) -> None:
        """Let the running requests finish, for at most the drain timeout, and end. May be repeated."""
        child, client = self._child, self._client
        if client is not None:
            await client.aclose()
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                async with asyncio.timeout(self._spec.drain_timeout_s + 15.0):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
        if self._reader is not None:
            await asyncio.wait({self._reader})
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _remove_left_behind() -> None:
    """The files of actors that were killed, since they contain keys."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
