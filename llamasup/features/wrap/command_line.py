"""Parses an existing llama-server command line: the address for llamasup, and the arguments for the child.

llamasup takes over only the address: ``--host``, ``--port``, ``--reuse-port`` and TLS (``--ssl-*``), wherever
they are set. All other arguments stay unchanged and in order. Keys, ``--api-prefix`` and ``--timeout`` are
read but also left to the child, so that clients see its own answers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.llama_server.argv_builder import (
    ParsedOption,
    ParsedOptions,
    options_in_config,
    options_in_environ,
    parse_options,
)
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.settings.names import names_of
from llamasup.errors import UsageInvalid

_ADDRESS_OPTIONS = ("--host", "--port", "--reuse-port", "--ssl-key-file", "--ssl-cert-file")
_INFO_OPTIONS = ("--help", "--version", "--list-devices", "--cache-list", "--completion-bash")
_OTHER_SOURCES = ("--model-url", "--hf-repo", "--hf-file", "--docker-repo")
# Options that name a model also set a port (b11434) [run]; --help does not mention it.
_PRESET_PORTS = (
    ("--embd-gemma-", 8011),
    ("--fim-qwen-", 8012),
    ("--gpt-oss-", 8013),
    ("--vision-gemma-", 8014),
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PLAIN_PREFIX = re.compile(r"(?:/[A-Za-z0-9_~-]+)*")
_SERVER_NAME = re.compile(r"(?:.*[/\\])?llama-server(?:[-_.][^/\\]*)?")
# Set by systemd for llamasup itself.
_OWN_VARIABLES = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}
)


class Tls(Struct, frozen=True):
    key_file: str
    cert_file: str


class WrappedLine(Struct, frozen=True):
    """A parsed command line.

    ``program``: the words before llama-server's own options. ``child_args``: the options of the child.
    ``address_index``: where its private address is inserted. ``hosts``: addresses, and paths that end in
    ``.sock``. ``prints_and_exits``: an option such as ``--help`` is given. ``override_tls``: TLS is set in a
    config file or before the program (``env LLAMA_ARG_SSL_KEY_FILE=…``), and the child needs empty options
    against it. ``removed_variables``: environment variables that the child does not get. ``name``: for
    messages, events and metrics; llama-server decides the name that clients use.
    """

    program: tuple[str, ...]
    child_args: tuple[str, ...]
    address_index: int
    hosts: tuple[str, ...]
    port: int
    reuse_port: bool
    tls: Tls | None
    override_tls: bool
    api_keys: tuple[str, ...]
    api_key_files: tuple[str, ...]
    api_prefix: str
    timeout_s: float | None
    model: str | None  # its path, if the file is known
    serves: ModelClass | None  # if the command line determines it
    name: str
    prints_and_exits: bool
    removed_variables: frozenset[str]

    @property
    def has_plain_prefix(self) -> bool:
        """Whether ``api_prefix`` matches only itself. llama-server matches routes as regular expressions."""
        return _PLAIN_PREFIX.fullmatch(self.api_prefix) is not None


def program_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words of ``command`` that come before llama-server's own options.

    ``env X=1 llama-server -m m.gguf``: the first three. If no word is named llama-server, the first word is
    the program, and its ``--help`` shows whether it is a llama-server.
    """
    for index, word in enumerate(command):
        is_embedded = word == "llamasup.embedded" and index and command[index - 1] == "-m"
        if is_embedded or _SERVER_NAME.fullmatch(word):
            return tuple(command[: index + 1])
    return tuple(command[:1])


def redacted_program(program: Sequence[str]) -> str:
    """Return the program for messages and logs: without the values that ``env`` sets, which may be keys
    (X13).
    """
    return shlex.join(_ASSIGNMENT.sub(r"\1=***", word) for word in program)


def _assigned(program: Sequence[str]) -> dict[str, str]:
    """Return what ``env NAME=VALUE … llama-server`` (or sudo, or systemd-run) sets for the program."""
    assignments = (_ASSIGNMENT.fullmatch(word) for word in program[1:-1])
    return {match[1]: match[2] for match in assignments if match is not None}


def parse_line(
    command: Sequence[str],
    program: Sequence[str],
    capabilities: Capabilities,
    environ: Mapping[str, str],
    config: Sequence[tuple[str, str]] = (),
) -> WrappedLine:
    """Parse ``command``. ``config``: the names and values in llama-server's config files.

    Config files come first, then the environment, then the command line; the last value wins, but keys add up
    [run, b11434]. Raises UsageInvalid.
    """
    on_line = parse_options(command[len(program) :], capabilities)
    in_config = options_in_config(config, capabilities)
    assigned = _assigned(program)
    in_environ = options_in_environ({**environ, **assigned}, capabilities)
    options = ParsedOptions((*in_config, *in_environ, *on_line))
    taken = {given for flag in _ADDRESS_OPTIONS for given in options.all(flag)}
    child_args: list[str] = []
    address_index: int | None = None
    for given in on_line:
        if given not in taken:
            child_args += given.words
        elif address_index is None:
            address_index = len(child_args)
    key_file, cert_file = options.value("--ssl-key-file"), options.value("--ssl-cert-file")
    downloads = any(options.value(flag) for flag in _OTHER_SOURCES) or any(map(_preset_port, options.options))
    model = None if downloads else options.value("--model")
    source = model or options.value("--hf-repo") or options.value("--model-url")
    known = [option for flag in _ADDRESS_OPTIONS if (option := capabilities.find(flag))]
    return WrappedLine(
        program=tuple(program),
        child_args=tuple(child_args),
        address_index=address_index or 0,
        hosts=_hosts(options, capabilities),
        port=_port(options, capabilities),
        reuse_port=options.switch("--reuse-port"),
        # With only one of the two, llama-server does not use TLS either (b11434) [run].
        tls=Tls(key_file, cert_file) if key_file and cert_file else None,
        override_tls=any(
            given in taken and given.named("--ssl-")
            for given in (*in_config, *options_in_environ(assigned, capabilities))
        ),
        api_keys=tuple(
            key for given in options.all("--api-key") for key in given.values[0].split(",") if key
        ),
        api_key_files=tuple(dict.fromkeys(given.values[0] for given in options.all("--api-key-file"))),
        api_prefix=options.value("--api-prefix") or "",
        timeout_s=_seconds(options.value("--timeout")),
        model=model,
        serves=_serves(options),
        name=_name(options.value("--alias"), source),
        prints_and_exits=any(given in on_line for flag in _INFO_OPTIONS for given in options.all(flag)),
        removed_variables=frozenset(option.env for option in known if option.env),
    )


def _hosts(options: ParsedOptions, capabilities: Capabilities) -> tuple[str, ...]:
    value, default = options.value("--host"), capabilities.find("--host")
    if value is None:
        value = (default and default.default) or "127.0.0.1"
    hosts = tuple(dict.fromkeys(host for part in value.split(",") if (host := part.strip())))
    if not hosts:
        raise UsageInvalid(
            f"--host {value!r} contains no address.", remedy="Give an address, or the path of a *.sock."
        )
    return hosts


def _port(options: ParsedOptions, capabilities: Capabilities) -> int:
    default = capabilities.find("--port")
    value = (default and default.default) or "8080"
    for given in options.options:
        if given.option is not None and "--port" in given.option.spellings:
            value = given.values[0]
        elif (preset := _preset_port(given)) is not None:
            value = str(preset)
    if not re.fullmatch(r"\s*\d{1,5}", value) or int(value) > 65535:
        raise UsageInvalid(
            f"--port {value!r} is not a port.", remedy="Give 1 to 65535, or 0 for any free port."
        )
    return int(value)


def _preset_port(given: ParsedOption) -> int | None:
    return next((port for start, port in _PRESET_PORTS if given.on and given.named(start)), None)


def _seconds(value: str | None) -> float | None:
    """Read a number. None also for an invalid one, which the child will report."""
    return float(value) if value is not None and re.fullmatch(r"\d{1,9}", value) else None


def _name(alias: str | None, model: str | None) -> str:
    first = next((name for part in (alias or "").split(",") if (name := part.strip())), None)
    if first is not None:
        return first
    # The name of org/repo:quant is repo.
    return "llama-server" if model is None else names_of(re.sub(r":[\w.-]+$", "", model), None).name


def _serves(options: ParsedOptions) -> ModelClass | None:
    if options.switch("--rerank"):
        return ModelClass.RERANKER
    if options.switch("--embedding"):
        return ModelClass.RERANKER if options.value("--pooling") == "rank" else ModelClass.ENCODER
    return None


def read_key_file(text: str) -> tuple[str, ...]:
    """Read the keys of an ``--api-key-file``: one per line, including blanks; ``#`` begins a comment
    (b11434).
    """
    return tuple(line for line in text.split("\n") if line and not line.startswith("#"))


# --- the child -------------------------------------------------------------------------------------


def child_argv(line: WrappedLine, address: Address, *, api_key_file: str | None = None) -> tuple[str, ...]:
    """Return the user's command line, with the child's private address in place of the public one."""
    if isinstance(address, UnixAddress):
        address_args = ["--host", address.path]
    else:
        address_args = ["--host", address.host, "--port", str(address.port)]
    if line.override_tls:
        address_args += ["--ssl-key-file", "", "--ssl-cert-file", ""]
    if api_key_file is not None:
        address_args += ["--api-key-file", api_key_file]
    before, after = line.child_args[: line.address_index], line.child_args[line.address_index :]
    return (*line.program, *before, *address_args, *after)


def child_environ(
    line: WrappedLine, environ: Mapping[str, str], *, api_key: str | None = None
) -> dict[str, str]:
    """Return the user's environment, without the variables for the address and for llamasup itself."""
    removed = line.removed_variables | _OWN_VARIABLES
    env = {name: value for name, value in environ.items() if name not in removed}
    # ggml's abort handler would start a debugger and wait for it without limit (b11434).
    env.setdefault("GGML_NO_BACKTRACE", "1")
    if api_key is not None:
        env["LLAMA_API_KEY"] = api_key
    return env


def query_environ(environ: Mapping[str, str], *, config_home: str | None = None) -> dict[str, str]:
    """Return the environment for ``--help``, which fails if a variable belongs to a removed option.

    ``config_home`` hides the user's config file, in which an invalid value would have the same effect.
    """
    env = {name: value for name, value in environ.items() if not name.startswith("LLAMA_ARG_")}
    if config_home is not None:
        env["XDG_CONFIG_HOME"] = config_home
    return env
