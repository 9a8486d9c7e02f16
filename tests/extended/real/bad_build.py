"""A build of llama.cpp with a fault: relays between llamasup and a real server, which it starts.

    python bad_build.py FAULT COMMAND… -- ARGUMENTS…

COMMAND is the real server, ARGUMENTS are those of llamasup. FAULT: ``none``; ``slow``: 20 % less speed;
``leak``: keeps 2 MB for each completion; ``crash``: ends at completion 50; ``wrong``: other text. Every
completion takes 150 ms longer, so that the noise of the machine matters less.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from time import monotonic

from tests.kit.paths import ROOT
from tests.kit.runtimes import shell_command

__all__ = ["build"]

_SLOWER_S = 0.15
_COMPLETION = b"POST /completion "


def build(path: Path, runtime: str, fault: str = "none") -> str:
    """Write the executable of a build. Fault ``flag``: it has no --keep."""
    real = shell_command(runtime)
    asks = f"{real} \"$@\" | sed 's/--keep/--kept/'" if fault == "flag" else f'exec {real} "$@"'
    relay = "none" if fault == "flag" else fault
    root = ROOT
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --help) {asks}; exit ;; --version|--list-devices) exec {real} "$@" ;; esac\n'
        f"export PYTHONPATH={shlex.quote(str(root))}\n"
        f'exec {shlex.quote(sys.executable)} -m tests.extended.real.bad_build {relay} {real} -- "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


class Relay:
    def __init__(self, fault: str, inner: str) -> None:
        self._fault = fault
        self._inner = inner
        self._completions = 0
        self._kept: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request on each connection: the answer of the real server closes it."""
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two has left
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        lengths = [line for line in lines if line.lower().startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b""
        kept = [line for line in lines[:-2] if not line.lower().startswith(b"connection:")]
        began_s = monotonic()
        from_server, to_server = await asyncio.open_unix_connection(self._inner)
        try:
            to_server.write(b"\r\n".join([*kept, b"Connection: close", b"", b""]) + body)
            if head.startswith(_COMPLETION):
                answer = await from_server.read()
                writer.write(await self._changed(answer, began_s))
            else:
                while chunk := await from_server.read(65536):
                    writer.write(chunk)
                    await writer.drain()
            await writer.drain()
        finally:
            to_server.close()

    async def _changed(self, answer: bytes, began_s: float) -> bytes:
        self._completions += 1
        await asyncio.sleep(_SLOWER_S)
        match self._fault:
            case "slow":
                await asyncio.sleep((monotonic() - began_s) * 0.25)
            case "leak":
                self._kept.append(b"x" * 2_000_000)
            case "crash" if self._completions == 50:
                os._exit(1)
            case "wrong":
                head, _, body = answer.partition(b"\r\n\r\n")
                content = json.loads(body)
                content["content"] = "?" + str(content["content"])
                lines = [
                    line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")
                ]
                body = json.dumps(content).encode()
                return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])
        return answer


async def main(fault: str, command: list[str], arguments: list[str]) -> int:
    at = arguments.index("--host") + 1
    outer = Path(arguments[at])
    inner = str(outer.with_name(f"i{outer.name}"))
    process = await asyncio.create_subprocess_exec(*command, *arguments[:at], inner, *arguments[at + 1 :])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.terminate)
    relay = Relay(fault, inner)
    server = await asyncio.start_unix_server(relay.serve, str(outer))
    code = await process.wait()
    server.close()
    return code


if __name__ == "__main__":
    cut = sys.argv.index("--")
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:cut], sys.argv[cut + 1 :])))
