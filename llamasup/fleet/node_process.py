"""Runs one llamasup on a node, as a child of the Ray actor. It exits with the actor.

It is the ordinary ``llamasup serve --sidecar`` with a config of one model. This module knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import ssl
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from llamasup.core.http.httpx_client import httpx
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.system.own_command import own_command
from llamasup.core.system.storage.folders import Claimed, claim
from llamasup.errors import ServerFailed
from llamasup.fleet.certificates import authority, node_certificate
from llamasup.fleet.messages import NodeLoad
from llamasup.fleet.node_config import CERTIFICATE, KEYS, PRIVATE_KEY
from llamasup.fleet.secret import control_key, node_key
from llamasup.fleet.secret_file import VARIABLE

STOP_S: Final = 30.0
"""``stop`` takes at most as long."""
NO_ANSWER: Final = (httpx.HTTPError, KeyError, TypeError, ValueError)
"""What a busy or ending llamasup makes of a question: no answer in time, or one without the model."""

_PREFIX = "llamasup-fleet-"
_ANSWER_S = 5.0  # of the control API on this machine
_SILENT_S = 60.0  # a machine at full load answers late; its requests still run
_KEPT_LINES = 4  # an error of a start is a sentence, its place, and what to do
_OF_CONFIG = re.compile(rf"\S*{_PREFIX}[^/\\]+[/\\]config\.yaml( has \d+ errors?\.|:\d+: |: )")
_ASK_AGAIN_S = 1.0  # signals that arrive together count as one


class NodeSpec(Struct, frozen=True):
    """The input of each node of one model. A change of it replaces the nodes. ``config``: YAML, for a folder
    with the files of ``node_config``. ``drain_timeout_s``: how long a node that leaves waits for requests.
    """

    model: str
    config: str
    secret: str = ""
    drain_timeout_s: float = 600.0

    def __repr__(self) -> str:
        return f"<NodeSpec of {self.model!r}>"  # Ray writes arguments to logs, which must not have the secret


class NodeProcess:
    """A llamasup as a child process. ``host`` is the address of this node for the fronts."""

    def __init__(self, spec: NodeSpec, host: str, environ: Mapping[str, str] = os.environ) -> None:
        self._spec = spec
        self._host = host
        self._environ = environ
        self._folder: Path | None = None
        self._lock: int | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._failure = ""
        self._client: httpx.AsyncClient | None = None
        self._answered_s = monotonic()
        self._slots = 1
        self.url = ""

    async def start(self) -> None:
        """Wait until the model serves. Raises ServerFailed."""
        command = own_command("llamasup")
        assert command is not None  # Ray runs in an ordinary Python
        await asyncio.to_thread(_remove_left_behind)
        config = await asyncio.to_thread(self._write_files)
        environ = {key: value for key, value in self._environ.items() if key != VARIABLE}
        self._child = await asyncio.create_subprocess_exec(
            *(*command, "serve", "--sidecar"),
            *("--config", str(config), "--host", self._host, "--port", "0"),
            stdin=asyncio.subprocess.PIPE,  # it stops when the actor exits, which closes the pipe
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**environ, "LLAMASUP_API_KEY": ""},
            limit=1 << 20,
        )
        self._reader = asyncio.get_running_loop().create_task(self._read_output(self._child), name="output")
        try:
            self.url = await self._started
        except BaseException:
            await self.stop(now=True)
            raise
        trust = ssl.create_default_context(cadata=authority(self._spec.secret))
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {control_key(self._spec.secret)}"},
            verify=trust,
            timeout=_ANSWER_S,
            trust_env=False,
        )

    def _write_files(self) -> Path:
        spec = self._spec
        folder, self._lock = _claimed_folder()
        self._folder = folder
        certificate = node_certificate(spec.secret, self._host)
        keys = (
            f"{node_key(spec.secret)} name=fleet rights=inference,node priority=high\n"
            f"{control_key(spec.secret)} name=fleet-node rights=control\n"
        )
        _write(folder / KEYS, keys.encode())
        _write(folder / CERTIFICATE, certificate.chain)
        _write(folder / PRIVATE_KEY, certificate.private_key)
        _write(folder / "config.yaml", spec.config.encode())
        return folder / "config.yaml"

    async def _read_output(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        assert child.stderr is not None
        messages: deque[str] = deque(maxlen=_KEPT_LINES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_pass_on(child.stderr, messages), name="messages")
            async for line in _lines(child.stdout):
                with contextlib.suppress(msgspec.DecodeError):
                    self._note(msgspec.json.decode(line))
        code = await child.wait()
        if not self._started.done():
            message = self._failure or _in_one_line(*messages) or f"llamasup ended with exit code {code}."
            self._started.set_exception(self._failed(message, code or 75))

    def _note(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"event": "ready", "url": str(url)} if not self._started.done():
                self._started.set_result(url)
            case {"event": "failed", "message": str(message), "remedy": str(remedy)}:
                details = event.get("details", ())  # they say more than the message, which counts them
                self._failure = _in_one_line(*(details or (message,)), remedy)
                if not self._started.done():
                    self._started.set_exception(self._failed(self._failure))

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.returncode

    async def check(self) -> None:
        """Raise ServerFailed if this node has to be replaced: llamasup has ended or given up.

        llamasup itself restarts a llama-server that crashed or hangs, so that is no reason. Nor is a late
        answer: the machine may be busy with the requests of this node.
        """
        if self.exit_code is not None:
            raise self._failed(f"llamasup ended with exit code {self.exit_code}.")
        try:
            model = await self._model()
        except NO_ANSWER as error:
            silent_s = monotonic() - self._answered_s
            if silent_s < _SILENT_S:
                return
            raise self._failed(f"llamasup has not answered for {silent_s:.0f} s ({error!r}).") from error
        if model["state"] == ShownState.FAILED:
            raise self._failed(self._failure or f"The model {self._spec.model!r} has failed.")

    def _failed(self, message: str, exit_code: int = 75) -> ServerFailed:
        return ServerFailed(f"Node {self._host}: {message}", cause="node_failed", exit_code=exit_code)

    async def load(self) -> NodeLoad:
        """Return the load of the model. Raises one of ``NO_ANSWER``."""
        model = await self._model()
        self._slots = model.get("slots") or self._slots  # not known while it loads or sleeps
        return NodeLoad(
            slots=self._slots,
            busy=model.get("in_flight") or 0,
            queued=model.get("queued") or 0,
            asleep=model["state"] == ShownState.STOPPED,
            ready=model["state"] == ShownState.READY,
        )

    async def wake(self) -> None:
        """Load the model if it sleeps. Raises one of ``NO_ANSWER``."""
        assert self._client is not None
        model = quote(self._spec.model, safe="")
        answer = await self._client.post(f"/llamasup/v1/models/{model}/load?wait=0")
        answer.raise_for_status()

    async def _model(self) -> Mapping[str, Any]:
        assert self._client is not None
        answer = await self._client.get("/llamasup/v1/status")
        answer.raise_for_status()
        models: dict[str, Mapping[str, Any]] = {model["id"]: model for model in answer.json()["models"]}
        found = models[self._spec.model]
        self._answered_s = monotonic()
        return found

    async def stop(self, *, now: bool) -> None:
        """Stop llamasup. ``now``: abort the running requests. May be repeated."""
        child, client = self._child, self._client
        if client is not None:
            await client.aclose()
        if child is not None and child.returncode is None:
            waits_s = (0.0 if now else STOP_S / 2, *(_ASK_AGAIN_S,) * int(STOP_S / 2))
            try:
                async with asyncio.timeout(STOP_S):
                    for wait_s in waits_s:  # from the second signal on, llamasup aborts its requests
                        with contextlib.suppress(ProcessLookupError):
                            child.terminate()
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(wait_s or _ASK_AGAIN_S):
                                await child.wait()
                                break
            except TimeoutError:
                pass
            if child.returncode is None:
                child.kill()
                await child.wait()
        if self._reader is not None:
            await asyncio.wait({self._reader})
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of ``stream``. A line that is longer than the limit loses its beginning."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line


async def _pass_on(stderr: asyncio.StreamReader, messages: deque[str]) -> None:
    """Write the lines to the log of the actor; ``messages`` keeps the last ones."""
    async for line in _lines(stderr):
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        messages.append(text.strip())


def _in_one_line(*messages: str) -> str:
    """Join the messages of a node. Its config is no file that a user has written, so the path and the lines
    of the config are left out.
    """
    shown = (_OF_CONFIG.sub("", line.removeprefix("llamasup: ").lstrip(" →")) for line in messages)
    return " ".join(line if line.endswith((".", "?")) else f"{line}." for line in shown if line)


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _claimed_folder() -> tuple[Path, int | None]:
    """A new folder, locked by this process."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Another actor may see it before it is locked, and take it for one that was left behind.
        with contextlib.suppress(Claimed, FileNotFoundError):
            return folder, claim(folder)


def _remove_left_behind() -> None:
    """Remove the folders of actors that were killed, because they contain keys: no process holds their lock.
    A PID would say less, because containers may share the folder.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(Claimed, OSError):  # in use; or of another user
            if (lock := claim(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
