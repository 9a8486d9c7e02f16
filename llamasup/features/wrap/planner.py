"""The planner of ``wrap``: the user's own llama-server command line, with only its address changed."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.gguf.files import read_model
from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.llama_server.argv_builder import config_files_in, read_config
from llamasup.core.llama_server.help_text import (
    Capabilities,
    looks_like_llama_server,
    parse_help,
    parse_version,
)
from llamasup.core.planning.measured.load_times import LoadFacts
from llamasup.core.planning.plan import child_address_kind, needs_key_file
from llamasup.core.supervision.plan_protocol import ChildPlan, FixedPlan, FixedPlanner
from llamasup.core.system.process.platform import free_loopback_port
from llamasup.core.system.process.run_folder import scratch_folder
from llamasup.core.system.process.run_once import CommandResult, run_commands
from llamasup.core.system.storage.folders import atomic_write
from llamasup.errors import BrokenRuntime, LlamasupError, RuntimeMissing, UsageInvalid
from llamasup.features.wrap.command_line import (
    WrappedLine,
    child_argv,
    child_environ,
    parse_line,
    program_of,
    query_environ,
    read_key_file,
    redacted_program,
)

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober

_ASK_TIMEOUT_S = 20.0
_KEY_BYTES = 24
_IS_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Classes that a plain command line serves; an embedding model without --embedding answers 501.
_GENERATING = frozenset({ModelClass.DECODER, ModelClass.ENCODER_DECODER})


class Wrapping(Struct, frozen=True):
    """A parsed command line with everything that is needed to run it.

    ``api_keys``: the known keys of clients. ``has_unreadable_keys``: only the child can read a key file.
    ``model_class``: None if unknown (a router, or a model that llama-server will download).
    """

    line: WrappedLine
    capabilities: Capabilities
    environ: Mapping[str, str]
    cwd: Path
    api_keys: tuple[str, ...]
    has_unreadable_keys: bool
    model_class: ModelClass | None

    @property
    def has_keys(self) -> bool:
        """Whether there are keys: llama-server ignores an empty key file (b11434)."""
        return bool(self.api_keys) or self.has_unreadable_keys

    @property
    def usable_key(self) -> str | None:
        """A key that a header can carry: llama-server keeps the blanks in the lines of a key file."""
        return next((key for key in reversed(self.api_keys) if re.fullmatch(r"[!-~]+", key)), None)

    @property
    def probe_class(self) -> ModelClass | None:
        """The class that decides on the warm-up request; None if no warm-up is possible."""
        return None if self.has_keys and self.usable_key is None else self.model_class

    @property
    def uses_socket(self) -> bool:
        return child_address_kind(self.capabilities, platform=sys.platform) == "unix"

    @property
    def shown(self) -> str:
        """Return the program and its version, without its arguments, which may contain a key (X13)."""
        return f"{redacted_program(self.line.program)} ({self.capabilities.version})"

    @property
    def needs_own_key(self) -> bool:
        """Whether the child needs a private key, because every user of this machine could reach it."""
        return not self.uses_socket and not self.has_keys


def parse_command(command: Sequence[str], environ: Mapping[str, str]) -> Wrapping:
    """Parse a command line by the program's own ``--help``. Starts no server.

    Raises UsageInvalid, RuntimeMissing (no such program) and BrokenRuntime (not a llama-server).
    """
    if not command:
        raise UsageInvalid(
            "wrap needs a command.", remedy="Write it after --: llamasup wrap -- llama-server -m FILE …"
        )
    program = program_of(command)
    capabilities, config = _query(program, environ)
    line = parse_line(command, program, capabilities, environ, config)
    in_files = [_keys_in(path) for path in line.api_key_files]
    return Wrapping(
        line=line,
        capabilities=capabilities,
        environ=dict(environ),
        cwd=Path.cwd(),
        api_keys=line.api_keys + tuple(key for keys in in_files for key in keys or ()),
        has_unreadable_keys=None in in_files,
        model_class=line.serves or _class_of(line.model),
    )


class WrappedPlanner(FixedPlanner):
    """Plans every generation with the same command line and a new address. ``folder``: the run folder."""

    def __init__(self, wrapping: Wrapping, folder: Path) -> None:
        self._wrapping = wrapping
        self._folder = folder

    def plan(self, generation: int) -> FixedPlan:
        wrapping = self._wrapping
        line = wrapping.line
        address: Address
        if wrapping.uses_socket:
            address = UnixAddress(str(self._folder / f"{generation}.sock"))
        else:
            address = TcpAddress("127.0.0.1", free_loopback_port())
        key = secrets.token_urlsafe(_KEY_BYTES) if wrapping.needs_own_key else None
        key_file: str | None = None
        if key is not None and needs_key_file(wrapping.capabilities):
            path = self._folder / f"{generation}.key"
            atomic_write(path, key.encode())
            key_file = str(path)
        return FixedPlan(
            argv=child_argv(line, address, api_key_file=key_file),
            env=child_environ(line, wrapping.environ, api_key=None if key_file else key),
            address=address,
            api_key=key,
            model_class=wrapping.model_class or ModelClass.DECODER,
        )

    def load_facts(self, made: FixedPlan) -> LoadFacts:
        """Return the facts of the model file, if it has one part, and of the last load in this run."""
        size_bytes = 0
        model = self._wrapping.line.model
        if model is not None and not _IS_PART.search(model):
            with suppress(OSError, ValueError):
                size_bytes = (self._wrapping.cwd / model).stat().st_size
        return LoadFacts(size_bytes, earlier=self._times)


def prober_for(wrapping: Wrapping, plan: ChildPlan) -> Prober:
    """Return a client of the child, with its path prefix and one of the keys."""
    from llamasup.core.llama_server.client import Prober

    return Prober(plan.address, plan.api_key or wrapping.usable_key, prefix=wrapping.line.api_prefix)


# --- asking the program ----------------------------------------------------------------------------


def _query(
    program: Sequence[str], environ: Mapping[str, str]
) -> tuple[Capabilities, tuple[tuple[str, str], ...]]:
    """The program's capabilities, and the content of the config files that it names (b11434) [run]."""
    answer, version = _run(program, query_environ(environ))
    options = parse_help(answer.stdout) or parse_help(answer.stderr)
    output = f"{answer.stderr}\n{answer.stdout}"
    if answer.exit_code != 0:
        # Perhaps a config file has an invalid value, which the child will report.
        with scratch_folder() as empty:
            answer, version = _run(program, query_environ(environ, config_home=empty))
        options = parse_help(answer.stdout) or parse_help(answer.stderr)
    if not looks_like_llama_server(options):
        raise _not_llama_server(program, answer)
    capabilities = Capabilities(parse_version(f"{version.stderr}\n{version.stdout}"), options, ())
    config: list[tuple[str, str]] = []
    for path in dict.fromkeys(config_files_in(output)):
        with suppress(OSError):
            config += read_config(Path(path).read_text("utf-8", errors="replace"))
    return capabilities, tuple(config)


def _run(program: Sequence[str], env: Mapping[str, str]) -> tuple[CommandResult, ...]:
    commands = [(*program, flag) for flag in ("--help", "--version")]
    try:
        return run_commands(commands, env=env, cwd=os.getcwd(), timeout_s=_ASK_TIMEOUT_S)  # noqa: PTH109 - unresolved
    except FileNotFoundError as error:
        raise RuntimeMissing(
            f"The program {program[0]!r} does not exist.", remedy="Give its path, or a name that is on PATH."
        ) from error
    except OSError as error:
        raise BrokenRuntime(
            f"Cannot execute {program[0]!r}: {error.strerror or error}.",
            remedy="Give a llama-server that runs on this machine.",
        ) from error


def _not_llama_server(program: Sequence[str], answer: CommandResult) -> BrokenRuntime:
    command = redacted_program(program)
    lines = tuple(line for line in f"{answer.stderr}\n{answer.stdout}".splitlines() if line.strip())[-4:]
    how = f"no answer within {_ASK_TIMEOUT_S:g} s" if answer.too_slow else f"exit code {answer.exit_code}"
    return BrokenRuntime(
        f"`{command} --help` does not answer as a llama-server does ({how}).",
        remedy="The command must pass the arguments that llamasup adds on to llama-server; in a script, "
        'use "$@". A container does not work, because it has its own network and folders.',
        lines=lines,
    )


def _keys_in(path: str) -> tuple[str, ...] | None:
    """Read the keys. None if the file cannot be read, which the child will report, or is a pipe, which only
    the child may read.
    """
    try:
        content = Path(path).read_bytes() if Path(path).is_file() else None
    except OSError:
        return None
    return None if content is None else read_key_file(content.decode("utf-8", "replace"))


def _class_of(model: str | None) -> ModelClass | None:
    if model is None:
        return None
    try:
        found = read_model(model).model_class
    except LlamasupError:
        return None  # the child will report the error
    return found if found in _GENERATING else None
