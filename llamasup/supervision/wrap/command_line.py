"""Reads an existing llama-server command line: what the front takes over, and what is left for the child.

Taken over is the address alone: ``--host``, ``--port``, ``--reuse-port`` and TLS (``--ssl-*``), wherever they
are set. Everything else stays as it is and where it is. Keys, ``--api-prefix`` and ``--timeout`` are only
understood: the child goes on judging keys and serving below its prefix, so that what clients see is its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamasup.errors import UsageInvalid
from llamasup.gguf.facts import ModelClass
from llamasup.http.address import Address, UnixAddress
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.parsed_options import (
    ParsedOption,
    ParsedOptions,
    options_in_config,
    options_in_environ,
    parse_options,
)
from llamasup.llama_server.settings import names_of

__all__ = [
    "Tls",
    "WrappedLine",
    "child_argv",
    "child_environ",
    "program_of",
    "question_environ",
    "read_key_file",
    "read_line",
    "shown_program",
]

_TAKEN = ("--host", "--port", "--reuse-port", "--ssl-key-file", "--ssl-cert-file")
_QUESTIONS = ("--help", "--version", "--list-devices", "--cache-list", "--completion-bash")
_OTHER_SOURCES = ("--model-url", "--hf-repo", "--hf-file", "--docker-repo")
# Options that name a model also set a port (b11434) [run]; --help does not say so.
_PRESET_PORTS = (
    ("--embd-gemma-", 8011),
    ("--fim-qwen-", 8012),
    ("--gpt-oss-", 8013),
    ("--vision-gemma-", 8014),
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PLAIN_PREFIX = re.compile(r"(?:/[A-Za-z0-9_~-]+)*")
_SERVER_NAME = re.compile(r"(?:.*[/\\])?llama-server(?:[-_.][^/\\]*)?")
# What the service manager says to the process that it started: us.
_TO_US = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}
)


@dataclass(frozen=True, slots=True)
class Tls:
    key_file: str
    cert_file: str


@dataclass(frozen=True, slots=True)
class WrappedLine:
    """A command line, understood.

    ``program`` is what comes before llama-server's own options; ``kept`` are those that the child keeps, and
    ``place`` is where among them its own address goes. ``hosts`` are addresses, and paths that end in
    ``.sock``. ``asks``: it is a question (``--help``), which llama-server answers before it ends.
    ``tls_elsewhere``: the child must be told not to do what its config file, or a word before the program
    (``env LLAMA_ARG_SSL_KEY_FILE=…``), says about TLS.
    ``taken_variables``: those of the environment that the child must not see.
    ``name`` is for people, events and metrics: what clients call the model is llama-server's to say.
    """

    program: tuple[str, ...]
    kept: tuple[str, ...]
    place: int
    hosts: tuple[str, ...]
    port: int
    reuse_port: bool
    tls: Tls | None
    tls_elsewhere: bool
    api_keys: tuple[str, ...]
    api_key_files: tuple[str, ...]
    api_prefix: str
    timeout_s: float | None
    model: str | None  # the path, where it is known which file will be loaded
    serves: ModelClass | None  # where the command line itself says so
    name: str
    asks: bool
    taken_variables: frozenset[str]

    @property
    def has_plain_prefix(self) -> bool:
        """Whether ``api_prefix`` matches only itself. llama-server matches routes as regular expressions."""
        return _PLAIN_PREFIX.fullmatch(self.api_prefix) is not None


def program_of(command: Sequence[str]) -> tuple[str, ...]:
    """The words of ``command`` that come before llama-server's own options.

    ``env X=1 llama-server -m m.gguf``: the first three. Where no word is called llama-server the first one is
    taken for it; whether it is one, its ``--help`` will show.
    """
    for place, word in enumerate(command):
        if _SERVER_NAME.fullmatch(word):
            return tuple(command[: place + 1])
        if word == "llamasup.embedded" and place and command[place - 1] == "-m":
            return tuple(command[: place + 1])
    return tuple(command[:1])


def shown_program(program: Sequence[str]) -> str:
    """For people and logs: of what ``env`` sets only the names, since there may be a key among it (X13)."""
    return shlex.join(_ASSIGNMENT.sub(r"\1=***", word) for word in program)


def _assigned(program: Sequence[str]) -> dict[str, str]:
    """What ``env NAME=VALUE … llama-server`` (or sudo, or systemd-run) sets for the program."""
    found = (_ASSIGNMENT.fullmatch(word) for word in program[1:-1])
    return {each[1]: each[2] for each in found if each is not None}


def read_line(
    command: Sequence[str],
    program: Sequence[str],
    capabilities: Capabilities,
    environ: Mapping[str, str],
    config: Sequence[tuple[str, str]] = (),
) -> WrappedLine:
    """What ``command`` means. ``config`` is what llama-server's config files say.

    The later of config files, environment and command line wins, except that keys add up [run, b11434].
    Raises UsageInvalid.
    """
    on_line = parse_options(command[len(program) :], capabilities)
    in_config = options_in_config(config, capabilities)
    assigned = _assigned(program)
    in_environ = options_in_environ({**environ, **assigned}, capabilities)
    every = ParsedOptions(capabilities, (*in_config, *in_environ, *on_line))
    taken = {each for flag in _TAKEN for each in every.all(flag)}
    kept: list[str] = []
    place: int | None = None
    for each in on_line:
        if each not in taken:
            kept += each.words
        elif place is None:
            place = len(kept)
    key_file, cert_file = every.value("--ssl-key-file"), every.value("--ssl-cert-file")
    downloads = any(every.value(flag) for flag in _OTHER_SOURCES) or any(map(_preset_port, every.given))
    model = None if downloads else every.value("--model")
    named = model or every.value("--hf-repo") or every.value("--model-url")
    variables = {option.env for flag in _TAKEN if (option := capabilities.find(flag)) and option.env}
    return WrappedLine(
        program=tuple(program),
        kept=tuple(kept),
        place=place or 0,
        hosts=_hosts(every),
        port=_port(every),
        reuse_port=every.switch("--reuse-port"),
        # One without the other is no TLS to llama-server either (b11434) [run].
        tls=Tls(key_file, cert_file) if key_file and cert_file else None,
        tls_elsewhere=any(
            each in taken and each.name.startswith("--ssl-")
            for each in (*in_config, *options_in_environ(assigned, capabilities))
        ),
        api_keys=tuple(key for each in every.all("--api-key") for key in each.value.split(",") if key),
        api_key_files=tuple(dict.fromkeys(each.value for each in every.all("--api-key-file"))),
        api_prefix=every.value("--api-prefix") or "",
        timeout_s=_seconds(every.value("--timeout")),
        model=model,
        serves=_serves(every),
        name=_name(every.value("--alias"), named),
        asks=any(each in on_line for flag in _QUESTIONS for each in every.all(flag)),
        taken_variables=frozenset(variables),
    )


def _hosts(every: ParsedOptions) -> tuple[str, ...]:
    value, default = every.value("--host"), every.capabilities.find("--host")
    if value is None:
        value = (default and default.default) or "127.0.0.1"
    hosts = tuple(dict.fromkeys(host for part in value.split(",") if (host := part.strip())))
    if not hosts:
        raise UsageInvalid(f"--host {value!r} names no address.", remedy="Give one, or the path of a *.sock.")
    return hosts


def _port(every: ParsedOptions) -> int:
    default = every.capabilities.find("--port")
    value = (default and default.default) or "8080"
    for each in every.given:
        if each.name == "--port":
            value = each.value
        elif (preset := _preset_port(each)) is not None:
            value = str(preset)
    if not re.fullmatch(r"\s*\d{1,5}", value) or int(value) > 65535:
        raise UsageInvalid(f"--port {value!r} is no port.", remedy="Give 1 to 65535, or 0 for any free one.")
    return int(value)


def _preset_port(given: ParsedOption) -> int | None:
    return next((port for start, port in _PRESET_PORTS if given.on and given.name.startswith(start)), None)


def _seconds(value: str | None) -> float | None:
    """None too for what is no number: the child will say what is wrong with it."""
    return float(value) if value is not None and re.fullmatch(r"\d{1,9}", value) else None


def _name(alias: str | None, model: str | None) -> str:
    first = next((name for part in (alias or "").split(",") if (name := part.strip())), None)
    if first is not None:
        return first
    # org/repo:quant is repo
    return "llama-server" if model is None else names_of(re.sub(r":[\w.-]+$", "", model), None).name


def _serves(every: ParsedOptions) -> ModelClass | None:
    if every.switch("--rerank"):
        return ModelClass.RERANKER
    if every.switch("--embedding"):
        return ModelClass.RERANKER if every.value("--pooling") == "rank" else ModelClass.ENCODER
    return None


def read_key_file(text: str) -> tuple[str, ...]:
    """The keys of an ``--api-key-file``: one a line, blanks and all; a hash begins a comment (b11434)."""
    return tuple(line for line in text.split("\n") if line and not line.startswith("#"))


# --- the child -------------------------------------------------------------------------------------


def child_argv(line: WrappedLine, address: Address, *, api_key_file: str | None = None) -> tuple[str, ...]:
    """The user's own words, with the private address where the public one was."""
    if isinstance(address, UnixAddress):
        own = ["--host", address.path]
    else:
        own = ["--host", address.host, "--port", str(address.port)]
    if line.tls_elsewhere:
        own += ["--ssl-key-file", "", "--ssl-cert-file", ""]
    if api_key_file is not None:
        own += ["--api-key-file", api_key_file]
    return (*line.program, *line.kept[: line.place], *own, *line.kept[line.place :])


def child_environ(
    line: WrappedLine, environ: Mapping[str, str], *, api_key: str | None = None
) -> dict[str, str]:
    """The user's own environment, less what was taken over and what is said to us."""
    gone = line.taken_variables | _TO_US
    env = {name: value for name, value in environ.items() if name not in gone}
    # ggml's abort handler would start a debugger and wait for it without limit (b11434).
    env.setdefault("GGML_NO_BACKTRACE", "1")
    if api_key is not None:
        env["LLAMA_API_KEY"] = api_key
    return env


def question_environ(environ: Mapping[str, str], *, config_home: str | None = None) -> dict[str, str]:
    """For asking what the program can do: the variable of a removed option is fatal even to ``--help``.

    ``config_home`` hides the user's config file, in which a bad value is just as fatal.
    """
    env = {name: value for name, value in environ.items() if not name.startswith("LLAMA_ARG_")}
    if config_home is not None:
        env["XDG_CONFIG_HOME"] = config_home
    return env
