"""Which options of a llama-server were given, wherever they can be: a config file, the environment, words.

What takes how many words, and which variable means what, is what the binary's own ``--help`` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llamasup.llama_server.capabilities import Capabilities, Option

__all__ = [
    "ParsedOption",
    "ParsedOptions",
    "config_files_in",
    "options_in_config",
    "options_in_environ",
    "parse_options",
    "read_config",
]

_TRUE = frozenset({"on", "enabled", "true", "1"})  # as llama-server reads them (b11434)


@dataclass(frozen=True, slots=True)
class ParsedOption:
    """One option, given once. ``name`` is the same for every spelling of it; "" for what the build lacks.

    ``on``: whether a switch was switched on. ``words`` are those of the command line.
    """

    name: str
    value: str = ""
    on: bool = True
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """All that was given, what counts least first."""

    capabilities: Capabilities
    given: tuple[ParsedOption, ...]

    def all(self, flag: str) -> tuple[ParsedOption, ...]:
        """Every time that this option was given, under whatever spelling."""
        option = self.capabilities.find(flag)
        return () if option is None else tuple(each for each in self.given if each.name == _name(option))

    def value(self, flag: str) -> str | None:
        """What counts: llama-server takes the last."""
        every = self.all(flag)
        return every[-1].value if every else None

    def switch(self, flag: str) -> bool:
        every = self.all(flag)
        return bool(every) and every[-1].on


def parse_options(words: Sequence[str], capabilities: Capabilities) -> tuple[ParsedOption, ...]:
    """Option by option, no word left out. What the build does not know is one word, for it to refuse."""
    return tuple(_on_line(words, capabilities))


def _on_line(words: Sequence[str], capabilities: Capabilities) -> Iterator[ParsedOption]:
    place = 0
    while place < len(words):
        word = words[place]
        option = capabilities.find(word)
        end = place + 1 + (option.arity if option is not None else 0)
        if option is None or end > len(words):
            yield ParsedOption("", words=(word,))
            place += 1
        else:
            values = tuple(words[place + 1 : end])
            on = word.replace("_", "-") not in option.negations
            yield ParsedOption(_name(option), " ".join(values), on, (word, *values))
            place = end


def options_in_environ(environ: Mapping[str, str], capabilities: Capabilities) -> tuple[ParsedOption, ...]:
    return tuple(
        ParsedOption(_name(option), environ[option.env], _is_on(environ[option.env]))
        for option in capabilities.options
        if option.env is not None and option.env in environ and not option.removed
    )


def options_in_config(
    config: Sequence[tuple[str, str]], capabilities: Capabilities
) -> tuple[ParsedOption, ...]:
    """``config`` is what ``read_config`` found. Names are options without dashes, or variables [run]."""
    variables = {option.env: option for option in capabilities.options if option.env}
    found = (
        (variables.get(name) or capabilities.find(f"--{name}") or capabilities.find(f"-{name}"), value)
        for name, value in config
    )
    return tuple(
        ParsedOption(_name(option), value, _is_on(value))
        for option, value in found
        if option is not None and not option.removed
    )


def config_files_in(said: str) -> tuple[str, ...]:
    """The config files that a build says it reads, whatever it is asked: ``I using config file: PATH``."""
    return tuple(re.findall(r"\busing config file: (.+?)\s*$", said, re.MULTILINE))


def read_config(text: str) -> tuple[tuple[str, str], ...]:
    """Names and values of a ``llama.cpp/config.ini``, in order.

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


def _name(option: Option) -> str:
    positive = [each for each in option.spellings if each not in option.negations]
    return max(positive or option.spellings, key=len)


def _is_on(value: str) -> bool:
    return value.lower() in _TRUE
