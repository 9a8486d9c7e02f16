"""llama-server options as they are given on a command line, in the environment or in a config file, and what
they are called here.

The build's own ``--help`` says how many words an option takes, and which variable sets it. ``OWN_OPTIONS``
has the words of llama-server and of other programs for what llamasup has an option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from llamasup.core.llama_server.help_text import Capabilities, Option
from llamasup.errors import UsageInvalid

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
