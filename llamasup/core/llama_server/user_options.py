"""llama-server options as they are given on a command line, in the environment or in a config file.

The build's own ``--help`` says how many words an option takes, and which variable sets it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
