"""llama-server's command line in one build's spelling: the flags of the plan and of the user, with reasons.

A flag that the build does not know is left out with a reason, or rejected if the user gave it, because
llama-server ends at once with an unknown flag (b11434: ``error: invalid argument``). Paths after ``--`` are
made absolute, because the child runs in another folder.

Options of the user are given on a command line, in the environment or in a config file. The build's own
``--help`` says how many words an option takes, and which variable sets it. ``OWN_OPTIONS`` has the words of
llama-server and of other programs for what llamasup has an option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from llamasup.core.llama_server.help_text import Capabilities, Option
from llamasup.core.system.text import joined_row, split_row
from llamasup.errors import UsageInvalid

# --- options of the user ---------------------------------------------------------------------------

_TRUE = frozenset({"on", "enabled", "true", "1"})  # as llama-server reads them (b11434)


class ParsedOption(Struct, frozen=True):
    """One occurrence of an option. ``option`` is None for an unknown word, or if values are missing.

    ``on``: whether a switch is switched on. ``words`` are those of the command line.
    """

    option: Option | None
    values: tuple[str, ...] = ()
    on: bool = True
    words: tuple[str, ...] = ()

    def named(self, prefix: str) -> bool:
        """Return whether a spelling of the option begins with ``prefix``."""
        return self.option is not None and any(name.startswith(prefix) for name in self.option.spellings)


class ParsedOptions(Struct, frozen=True):
    """Parsed options, those with the lowest precedence first: of repeated ones the last counts."""

    options: tuple[ParsedOption, ...] = ()

    def all(self, flag: str) -> tuple[ParsedOption, ...]:
        """Return every occurrence of this option, in whatever spelling."""
        return tuple(
            given for given in self.options if given.option is not None and flag in given.option.spellings
        )

    def has(self, flag: str) -> bool:
        return bool(self.all(flag))

    def value(self, flag: str) -> str | None:
        given = self.all(flag)
        return given[-1].values[0] if given and given[-1].values else None

    def switch(self, flag: str) -> bool:
        """Return whether a switch is given and not switched off later."""
        given = self.all(flag)
        return bool(given) and given[-1].on

    def number(self, flag: str) -> int | None:
        """Return the value as an integer. Raises UsageInvalid if it is not one."""
        value = self.value(flag)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise UsageInvalid(
                f"{flag} needs a whole number, not {value!r}", remedy="correct the arguments after --"
            ) from None


def parse_options(words: Sequence[str], capabilities: Capabilities) -> tuple[ParsedOption, ...]:
    """Parse all words, option by option.

    A word that the build does not know is an option without ``option``.
    """
    parsed: list[ParsedOption] = []
    start = 0
    while start < len(words):
        word = words[start]
        option = capabilities.find(word)
        end = start + 1 + (option.arity if option is not None else 0)
        if option is None or end > len(words):
            end = start + 1
            parsed.append(ParsedOption(None, words=(word,)))
        else:
            values = tuple(words[start + 1 : end])
            on = word.replace("_", "-") not in option.negations
            parsed.append(ParsedOption(option, values, on, (word, *values)))
        start = end
    return tuple(parsed)


def options_in_environ(environ: Mapping[str, str], capabilities: Capabilities) -> tuple[ParsedOption, ...]:
    return tuple(
        ParsedOption(option, (environ[option.env],), _is_on(environ[option.env]))
        for option in capabilities.options
        if option.env is not None and option.env in environ and not option.removed
    )


def options_in_config(
    config: Sequence[tuple[str, str]], capabilities: Capabilities
) -> tuple[ParsedOption, ...]:
    """Return the options in ``config``, which comes from ``read_config``.

    Names are options without dashes, or variables [run].
    """
    variables = {option.env: option for option in capabilities.options if option.env}
    found = (
        (variables.get(name) or capabilities.find(f"--{name}") or capabilities.find(f"-{name}"), value)
        for name, value in config
    )
    return tuple(
        ParsedOption(option, (value,), _is_on(value))
        for option, value in found
        if option is not None and not option.removed
    )


def config_files_in(output: str) -> tuple[str, ...]:
    """Return the config files that a build names in its output: ``I using config file: PATH``."""
    return tuple(re.findall(r"\busing config file: (.+?)\s*$", output, re.MULTILINE))


def read_config(text: str) -> tuple[tuple[str, str], ...]:
    """Return the names and values of a ``llama.cpp/config.ini``, in order.

    Lines before any section and those below ``[*]`` and ``[default]`` count [run, b11434]; other sections are
    presets.
    """
    found: list[tuple[str, str]] = []
    counts = True
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            counts = line in ("[*]", "[default]")
        elif counts and "=" in line and line[0] not in "#;":
            name, _, value = line.partition("=")
            found.append((name.strip(), value.strip()))
    return tuple(found)


def _is_on(value: str) -> bool:
    return value.lower() in _TRUE


# --- words of llama-server and other programs ------------------------------------------------------

NOT_PASSED_ON = ("LLAMA_ARG_", "LLAMA_API_KEY", "LLAMA_SERVER_", "AIP_")
"""The beginnings of the variables that would set options of llama-server."""

_WORDS = {
    "MODEL": "-m --model -hf --hf-repo -mu --model-url",
    "--alias": "-a --served-model-name",
    "--api-key-file": "--api-key",
    "--ctx-size": "-c --ctx --n-ctx --num-ctx --context --context-size --context-length --contextsize "
    "--max-model-len",
    "--draft-model": "-md --model-draft --spec-draft-model --draftmodel --speculative-model",
    "--flash-attn": "-fa --flash-attention --flashattention",
    "--gpu-layers": "-ngl --n-gpu-layers --num-gpu --gpulayers --gpu",
    "--kv-type": "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype --quantkv",
    "--mmproj": "-mm",
    "--models-dir": "--models",
    "--parallel": "-np --n-parallel --num-parallel --max-num-seqs",
    "--request-timeout": "-to --timeout",
    "--threads": "-t --num-thread --num-threads",
    "--tls-cert": "--ssl-cert-file --ssl-certfile",
    "--tls-key": "--ssl-key-file --ssl-keyfile",
    "-- --temp": "--temperature",
    "-- --n-predict": "-n --predict",
}
OWN_OPTIONS: Mapping[str, str] = MappingProxyType(
    {word: own for own, words in _WORDS.items() for word in words.split()}
)
"""The option of llamasup for each word, or llama-server's own one after the dashes."""

_SAME = ("--alias", "--api-key-file", "--ctx-size", "--flash-attn", "--gpu-layers", "--host", "--mmproj")
_SAME_OPTIONS = frozenset({*_SAME, "--models-dir", "--parallel", "--port", "--threads"})


def ignored_variables(environ: Mapping[str, str], capabilities: Capabilities | None = None) -> str:
    """Return a sentence about variables that no llama-server gets, with the option for each; or "".

    ``capabilities``: of the build that a single model has.
    """
    names = sorted(name for name, value in environ.items() if value and name.startswith(NOT_PASSED_ON))
    if not names:
        return ""
    spelled = {} if capabilities is None else {each.env: each.spellings for each in capabilities.options}
    listed = ", ".join(f"{name} ({_instead(name, spelled.get(name, ()))})" for name in names)
    return f"llama-server does not get these variables of the environment: {listed}."


def _instead(variable: str, spellings: tuple[str, ...]) -> str:
    guessed = "--" + variable.removeprefix("LLAMA_ARG_").removeprefix("LLAMA_").lower().replace("_", "-")
    for word in (*spellings, guessed):
        if own := OWN_OPTIONS.get(word, word if word in _SAME_OPTIONS else None):
            return f"use {own}"
    return f"use -- {spellings[-1]}" if spellings else "use an option, or `extra` of a model"


# --- the command line ------------------------------------------------------------------------------


class Reason(Struct, frozen=True):
    """The reason why a flag is on the command line, or (``passed`` false) why it is not."""

    flag: str
    value: str | None
    reason: str
    passed: bool = True


ExtraArgs = ParsedOptions
"""The user's own llama-server arguments, after ``--`` or ``extra`` in a config."""


BY_USER = "given by the user after --"
"""The reason of a flag of the user."""


class CommandLine(Struct, eq=False):
    """Collects the flags of one plan, each with its reason. Owned by one call of ``plan``.

    ``only_asked``: pass only what is essential or what the user set (profile plain). ``measured``: flags that
    replace the plan's own, for the reason ``why_measured``; the user's own flags win.
    """

    command: Iterable[str]
    capabilities: Capabilities
    extra_args: ExtraArgs
    only_asked: bool = False
    measured: ExtraArgs = ExtraArgs()
    why_measured: str = ""
    _argv: list[str] = []
    _reasons: list[Reason] = []

    def __post_init__(self) -> None:
        self._argv += self.command

    @property
    def argv(self) -> tuple[str, ...]:
        return tuple(self._argv)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return tuple(self._reasons)

    def give(
        self,
        spellings: str | tuple[str, ...],
        value: object,
        reason: str,
        *,
        asked: str | None = None,
        otherwise: str = "",
        essential: bool = False,
    ) -> bool:
        """Pass a flag in the first of these spellings that the build knows; ``value`` None for a switch.

        ``asked``: the user's own setting that needs the flag, and is an error in a build without it.
        ``otherwise``: the effect in a build without the flag. ``essential``: a setting of the user does not
        work without it. Returns whether the flag is passed.
        """
        names = (spellings,) if isinstance(spellings, str) else spellings
        text = None if value is None else str(value)
        known = self.capabilities.knows(*names)
        if known is None:
            if asked is not None:
                raise unknown_flag(self.capabilities, names[0], asked)
            self.leave_out(names[0], otherwise or "this build does not have it", value=text)
            return False
        if self.extra_args.has(known):
            self.leave_out(known, "", value=text)
            return False
        if self.measured.has(known):
            return False  # append_extra passes the measured value
        if self.only_asked and asked is None and not essential:
            self.leave_out(known, "the profile plain passes only what is needed or requested", value=text)
            return False
        self._argv += [known] if text is None else [known, text]
        self._reasons.append(Reason(known, text, reason))
        return True

    def leave_out(self, flag: str, reason: str, *, value: str | None = None) -> None:
        """Record why a flag is not passed."""
        if self.measured.has(flag):
            return  # it is passed with its measured value
        if self.extra_args.has(flag):
            reason = "set by the user after --"
        self._reasons.append(Reason(flag, value, f"left out: {reason}", passed=False))

    def append_extra(self) -> None:
        """Append the measured flags, and the user's own arguments, unchanged: of repeated flags llama-server
        uses the last.
        """
        for options, why in ((self.measured.options, self.why_measured), (self.extra_args.options, BY_USER)):
            for given in options:
                self._argv += given.words
                value = " ".join(given.values) if given.values else None
                self._reasons.append(Reason(given.words[0], value, why))


def asked_with(option: str, setting: object) -> str | None:
    """Return llamasup's own option for ``give``, if the user set it."""
    return None if setting is None else option


def unknown_flag(capabilities: Capabilities, flag: str, asked: str) -> UsageInvalid:
    """Return the error for a setting of the user that the build does not support."""
    option = capabilities.find(flag)
    is_removed = option is not None and option.removed
    nearest = capabilities.nearest(flag)
    version = f" ({capabilities.version})" if capabilities.version else ""
    lacks = "no longer has" if is_removed else "has no"
    what = f"this {capabilities.program}{version} {lacks} {flag}"
    if flag != asked:
        what = f"{asked} is not supported: {what}"
    if nearest is not None:
        remedy = f"the closest option that it has is {nearest}"
    else:
        remedy = f"leave {asked} out, or use another build with --runtime"
    return UsageInvalid(what, remedy=remedy)


# --- the user's own arguments --------------------------------------------------------------------

_TOOLS = frozenset({"--tools", "-ag", "--agent", "--ui-mcp-proxy", "--webui-mcp-proxy"})
_OF_TOOLS = ("--tools-", "--mcp-")  # --tools-runtime, --mcp-servers-config, --mcp-servers-json (b11434)
_RESERVED: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"--host", "--port", "--reuse-port"}),
        "use llamasup's --host and --port, where clients connect",
    ),
    (frozenset({"--api-key", "--api-key-file"}), "use llamasup's --api-key-file or $LLAMASUP_API_KEY"),
    (
        frozenset({"-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"})
        | {"-hft", "--hf-token", "-dr", "--docker-repo"},
        "name the model as llamasup's MODEL argument",
    ),
    (frozenset({"-a", "--alias"}), "use llamasup's --alias: clients request the model by this name"),
    (
        frozenset({"--ssl-key-file", "--ssl-cert-file"}),
        "llamasup talks to llama-server over a private socket; put a TLS proxy in front of llamasup",
    ),
    (
        frozenset({"--api-prefix"}),
        "llamasup serves llama-server's own paths; set a prefix in front of llamasup",
    ),
    (
        frozenset({"--models-dir", "--models-preset", "--models-max", "--models-autoload"}),
        "llamasup runs one model per llama-server; for several models, use llamasup serve",
    ),
    (
        frozenset({"-h", "--help", "--usage", "--version", "--list-devices", "-cl", "--cache-list"})
        | {"--completion-bash"},
        "it makes llama-server print and exit: run llama-server itself with it",
    ),
    (frozenset({"--log-jsonl"}), "llamasup diagnoses crashes by llama-server's plain log"),
    (_TOOLS, "it lets models start programs and reach every address; only `llamasup wrap` passes it on"),
)


def read_extra(capabilities: Capabilities, extra: tuple[str, ...]) -> ExtraArgs:
    """Parse the user's llama-server arguments. Raises UsageInvalid for what cannot work."""
    parsed = parse_options(extra, capabilities)
    for number, given in enumerate(parsed):
        word = given.words[0]
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            after = f" after {parsed[number - 1].words[0]}" if number else ""
            raise UsageInvalid(
                f"{word!r}{after} is not an option of llama-server", remedy="options start with -"
            )
        option = capabilities.find(name)
        _refuse_reserved(name, option)
        if option is None or option.removed:
            raise _refusal(capabilities, name, option)
        if equals:
            raise UsageInvalid(f"llama-server does not accept {word!r}", remedy=f"write {name} {value}")
        if given.option is None:
            raise UsageInvalid(f"{word} needs a value ({option.argument})", remedy="add it after the flag")
    return ExtraArgs(parsed)


def _refuse_reserved(name: str, option: Option | None) -> None:
    spelling = name.replace("_", "-")
    spellings = {spelling, *(option.spellings if option else ())}
    if spelling.startswith(_OF_TOOLS):
        spellings |= _TOOLS
    is_off = option is not None and spelling in option.negations
    for reserved, instead in _RESERVED:
        if spellings & reserved and not is_off:
            raise UsageInvalid(f"{name} is not allowed after --", remedy=instead)
    # "--fim-qwen-7b-default" and similar options name a model, and a port of their own.
    if option is not None and "can download weights" in option.description:
        raise UsageInvalid(
            f"{name} makes llama-server download a model",
            remedy="name the model as llamasup's MODEL argument",
        )


def _refusal(capabilities: Capabilities, name: str, option: Option | None) -> UsageInvalid:
    error = unknown_flag(capabilities, name, name)
    if option is not None and option.removed_hint:
        return UsageInvalid(error.message, remedy=f"use {option.removed_hint}")
    if option is None and capabilities.nearest(name) is None:
        remedy = error.remedy.rstrip(".")
        return UsageInvalid(
            error.message, remedy=f"{remedy}; if {name} is an option of llamasup, put it before --"
        )
    return error


# The placeholders of llama-server's help: FNAME, FILE, PATH, DIR, FNAME:SCALE,..., JINJA_TEMPLATE_FILE.
_IS_PATH = re.compile(r"(?<![A-Z])(?:FNAME|FILE|PATH|DIR)(?![A-Z])")
_SCALE = re.compile(r":[-+]?[\d.]+$")


def with_absolute_paths(
    capabilities: Capabilities, extra: tuple[str, ...], resolve: Callable[[str], str]
) -> tuple[str, ...]:
    """Return the user's llama-server arguments with ``resolve`` applied to every path in them.

    A missing path is no error here: llama-server reports it. Raises UsageInvalid as ``read_extra`` does.
    """
    words: list[str] = []
    for given in read_extra(capabilities, extra).options:
        assert given.option is not None
        words.append(given.words[0])
        for value, placeholder in zip(given.values, given.option.argument_words, strict=True):
            is_path = _IS_PATH.search(placeholder) is not None
            words.append(_resolve_value(value, placeholder, given.option, resolve) if is_path else value)
    return tuple(words)


def _resolve_value(value: str, placeholder: str, option: Option, resolve: Callable[[str], str]) -> str:
    several = placeholder.endswith(",...") or "comma-separated" in option.description
    parts = split_row(value)
    if not several:  # such a build has no quotes either
        return resolve(parts[0] if len(parts) == 1 else value) if value else value
    scaled = ":SCALE" in placeholder
    return joined_row(_resolve_scaled(part, resolve, scaled=scaled) for part in parts)


def _resolve_scaled(path: str, resolve: Callable[[str], str], *, scaled: bool) -> str:
    scale = _SCALE.search(path) if scaled else None
    name, rest = (path[: scale.start()], scale[0]) if scale else (path, "")
    return resolve(name) + rest if name else path
