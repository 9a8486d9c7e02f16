"""Starts a llama-server as a given command line says, with nothing but its address changed."""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamasup.errors import BrokenRuntime, LlamasupError, RuntimeMissing, UsageInvalid
from llamasup.gguf.facts import ModelClass
from llamasup.gguf.files import read_model
from llamasup.http.address import Address, TcpAddress, UnixAddress
from llamasup.llama_server.capabilities import (
    Capabilities,
    looks_like_llama_server,
    parse_help,
    parse_version,
)
from llamasup.llama_server.client import Prober
from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.parsed_options import config_files_in, read_config
from llamasup.llama_server.plan_limits import Adjustment
from llamasup.llama_server.slots.policy import KeptSlots
from llamasup.planning.child_address import child_address_kind, needs_key_file
from llamasup.supervision.plan_protocol import ChildPlan
from llamasup.supervision.wrap.command_line import (
    WrappedLine,
    child_argv,
    child_environ,
    program_of,
    question_environ,
    read_key_file,
    read_line,
    shown_program,
)
from llamasup.system.process.platform import free_loopback_port
from llamasup.system.process.run_once import CommandResult, run_commands
from llamasup.system.storage.folders import atomic_write

__all__ = ["WrappedPlan", "WrappedPlanner", "Wrapping", "parse_command", "prober_for"]

_ASK_TIMEOUT_S = 20.0
_KEY_BYTES = 24
# Classes that a plain command line serves; an embedding model without --embedding answers 501 to all.
_GENERATING = frozenset({ModelClass.DECODER, ModelClass.ENCODER_DECODER})


@dataclass(frozen=True, slots=True)
class Wrapping:
    """A command line that is understood, and all that is needed to run it.

    ``api_keys``: those that clients may use, as far as they are known; ``unknown_keys``: there is a key file
    that only the child can read. ``model_class``: None where nobody knows (a router, a download to come).
    """

    line: WrappedLine
    capabilities: Capabilities
    environ: Mapping[str, str]
    cwd: Path
    api_keys: tuple[str, ...]
    unknown_keys: bool
    model_class: ModelClass | None

    @property
    def has_keys(self) -> bool:
        """An empty key file is none to llama-server either (b11434)."""
        return bool(self.api_keys) or self.unknown_keys

    @property
    def usable_key(self) -> str | None:
        """One that a header can carry: llama-server takes the lines of a key file with their blanks."""
        return next((key for key in reversed(self.api_keys) if re.fullmatch(r"[!-~]+", key)), None)

    @property
    def probe_class(self) -> ModelClass | None:
        """What decides on a first request; None where there is none that could be made."""
        return None if self.has_keys and self.usable_key is None else self.model_class

    @property
    def on_socket(self) -> bool:
        return child_address_kind(self.capabilities, platform=sys.platform) == "unix"

    @property
    def needs_own_key(self) -> bool:
        """Whether every user of this machine could reach the child; clients need not know the key then."""
        return not self.on_socket and not self.has_keys


@dataclass(frozen=True, slots=True)
class WrappedPlan:
    """How one generation is started; ``runtime.plans.ChildPlan`` says what for."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: Address
    api_key: str | None
    model_class: ModelClass
    checked: bool = False
    parallel: int | None = None
    ctx_size: int | None = None
    slots: KeptSlots | None = None
    device: str | None = None


def parse_command(command: Sequence[str], environ: Mapping[str, str]) -> Wrapping:
    """Read a command line with the help of the program itself. Starts no server.

    Raises UsageInvalid, RuntimeMissing (no such program) and BrokenRuntime (no llama-server).
    """
    if not command:
        raise UsageInvalid(
            "wrap was given no command.", remedy="Write it after --: llamasup wrap -- llama-server -m FILE …"
        )
    program = program_of(command)
    capabilities, config = _asked(program, environ)
    line = read_line(command, program, capabilities, environ, config)
    in_files = [_keys_in(path) for path in line.api_key_files]
    return Wrapping(
        line=line,
        capabilities=capabilities,
        environ=dict(environ),
        cwd=Path.cwd(),
        api_keys=line.api_keys + tuple(key for keys in in_files for key in keys or ()),
        unknown_keys=None in in_files,
        model_class=line.serves or _class_of(line.model),
    )


class WrappedPlanner:
    """Gives every generation the same command line, each with an address of its own. Learns nothing.

    ``folder`` is where the private files of this run are.
    """

    def __init__(self, wrapping: Wrapping, folder: Path) -> None:
        self._wrapping = wrapping
        self._folder = folder

    def plan(self, generation: int) -> WrappedPlan:
        wrapping = self._wrapping
        line = wrapping.line
        address: Address
        if wrapping.on_socket:
            address = UnixAddress(str(self._folder / f"{generation}.sock"))
        else:
            address = TcpAddress("127.0.0.1", free_loopback_port())
        key = secrets.token_urlsafe(_KEY_BYTES) if wrapping.needs_own_key else None
        key_file: str | None = None
        if key is not None and needs_key_file(wrapping.capabilities):
            path = self._folder / f"{generation}.key"
            atomic_write(path, key.encode())
            key_file = str(path)
        return WrappedPlan(
            argv=child_argv(line, address, api_key_file=key_file),
            env=child_environ(line, wrapping.environ, api_key=None if key_file else key),
            address=address,
            api_key=key,
            model_class=wrapping.model_class or ModelClass.DECODER,
        )

    def step_down(self, made: WrappedPlan, diagnosis: Diagnosis) -> Adjustment | None:
        """Never: the command line is the user's."""
        return None

    def served(
        self, made: WrappedPlan, log: Sequence[str], *, resident_bytes: int | None, generated: bool
    ) -> None:
        pass


def prober_for(wrapping: Wrapping, plan: ChildPlan) -> Prober:
    """Asks as a client of the user's would: below the prefix, with one of the keys."""
    return Prober(plan.address, plan.api_key or wrapping.usable_key, prefix=wrapping.line.api_prefix)


# --- asking the program ----------------------------------------------------------------------------


def _asked(
    program: Sequence[str], environ: Mapping[str, str]
) -> tuple[Capabilities, tuple[tuple[str, str], ...]]:
    """What the program can do, and what its config files say; it tells which it reads (b11434) [run]."""
    answer, version = _answers(program, question_environ(environ))
    options = parse_help(answer.stdout) or parse_help(answer.stderr)
    said = f"{answer.stderr}\n{answer.stdout}"
    if answer.exit_code != 0:
        # A config file with a bad value in it, perhaps. The child will say so.
        with tempfile.TemporaryDirectory(prefix="llamasup-") as empty:
            answer, version = _answers(program, question_environ(environ, config_home=empty))
        options = parse_help(answer.stdout) or parse_help(answer.stderr)
    if not looks_like_llama_server(options):
        raise _no_server(program, answer)
    capabilities = Capabilities(parse_version(f"{version.stderr}\n{version.stdout}"), options, ())
    config: list[tuple[str, str]] = []
    for path in dict.fromkeys(config_files_in(said)):
        with suppress(OSError):
            config += read_config(Path(path).read_text("utf-8", errors="replace"))
    return capabilities, tuple(config)


def _answers(program: Sequence[str], env: Mapping[str, str]) -> tuple[CommandResult, ...]:
    commands = [(*program, flag) for flag in ("--help", "--version")]
    try:
        return run_commands(commands, env=env, cwd=os.getcwd(), timeout_s=_ASK_TIMEOUT_S)  # noqa: PTH109 - as it is
    except FileNotFoundError as error:
        raise RuntimeMissing(
            f"There is no program {program[0]!r}.", remedy="Give its path, or a name that is on PATH."
        ) from error
    except OSError as error:
        raise BrokenRuntime(
            f"Cannot execute {program[0]!r}: {error.strerror or error}.",
            remedy="Give a llama-server that runs on this machine.",
        ) from error


def _no_server(program: Sequence[str], answer: CommandResult) -> BrokenRuntime:
    shown = shown_program(program)
    lines = tuple(line for line in f"{answer.stderr}\n{answer.stdout}".splitlines() if line.strip())[-4:]
    how = f"not within {_ASK_TIMEOUT_S:g} s" if answer.too_slow else f"exit code {answer.exit_code}"
    return BrokenRuntime(
        f"`{shown} --help` does not answer as a llama-server does ({how}).",
        remedy="COMMAND must pass the words behind it on to llama-server: flags that llamasup adds have to "
        'reach it. A script does that with "$@"; a container\'s own network and folders are out of reach.',
        lines=lines,
    )


def _keys_in(path: str) -> tuple[str, ...] | None:
    """None where it cannot be read: the child will say so. What a pipe holds is the child's to take."""
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
        return None  # the child will say what is wrong with it
    return found if found in _GENERATING else None
