"""llama-server's command line in one build's spelling: the flags of the plan and those of the user, with
reasons.

A flag that the build does not know is left out with a reason, or refused if the user gave it. It is never
passed: one unknown flag ends llama-server at once (b11434: ``error: invalid argument``). Paths after ``--``
are made absolute, because the child runs in another folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llamasup.errors import UsageInvalid
from llamasup.llama_server.capabilities import Capabilities, Option

__all__ = ["CommandLine", "ExtraArgs", "Reason", "asked_with", "read_extra", "with_absolute_paths"]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a flag is on the command line, or (``passed`` false) why it is not."""

    flag: str
    value: str | None
    reason: str
    passed: bool = True


@dataclass(frozen=True, slots=True)
class ExtraFlag:
    """One flag that the user gave after ``--``."""

    spelling: str
    option: Option
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExtraArgs:
    """The llama-server arguments that the user gave, read as that build will read them."""

    flags: tuple[ExtraFlag, ...] = ()

    def has(self, spelling: str) -> bool:
        return self._last(spelling) is not None

    def value(self, spelling: str) -> str | None:
        """The value of the last occurrence, which is the one that counts."""
        flag = self._last(spelling)
        return flag.values[0] if flag is not None and flag.values else None

    def switch(self, spelling: str) -> bool:
        """Whether a switch was given, and not taken back by its negation."""
        flag = self._last(spelling)
        return flag is not None and flag.spelling not in flag.option.negations

    def number(self, spelling: str) -> int | None:
        """The value as an integer. Raises UsageInvalid where it is none."""
        value = self.value(spelling)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise UsageInvalid(
                f"{spelling} needs a whole number, not {value!r}", remedy="correct the arguments after --"
            ) from None

    def _last(self, spelling: str) -> ExtraFlag | None:
        if not self.flags:  # as in most plans, and twenty times in each
            return None
        return next((flag for flag in reversed(self.flags) if spelling in flag.option.spellings), None)


class CommandLine:
    """Collects the flags of one plan, each with its reason. Owned by one call of ``plan``."""

    def __init__(
        self,
        command: Iterable[str],
        capabilities: Capabilities,
        extra_args: ExtraArgs,
        *,
        only_asked: bool = False,
    ) -> None:
        """``only_asked``: pass nothing but what is essential and what was asked for (profile plain)."""
        self._argv = list(command)
        self._reasons: list[Reason] = []
        self._capabilities = capabilities
        self._by_hand = extra_args
        self._only_asked = only_asked

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

        ``asked`` is the user's own setting that needs the flag: without the flag that is an error.
        ``otherwise`` says what holds in a build that does not have the flag. ``essential``: what was asked
        for cannot be served without it. Returns whether it is passed.
        """
        names = (spellings,) if isinstance(spellings, str) else spellings
        text = None if value is None else str(value)
        known = self._capabilities.knows(*names)
        if known is None:
            if asked is not None:
                raise unknown_flag(self._capabilities, names[0], asked)
            self.leave_out(names[0], otherwise or "this build does not have it", value=text)
            return False
        if self._by_hand.has(known):
            self.leave_out(known, "", value=text)
            return False
        if self._only_asked and asked is None and not essential:
            self.leave_out(known, "the profile plain passes only what is needed or was asked for", value=text)
            return False
        self._argv += [known] if text is None else [known, text]
        self._reasons.append(Reason(known, text, reason))
        return True

    def leave_out(self, flag: str, reason: str, *, value: str | None = None) -> None:
        """Say why a flag is not passed."""
        if self._by_hand.has(flag):
            reason = "set by hand after --"
        self._reasons.append(Reason(flag, value, f"left out: {reason}", passed=False))

    def append_by_hand(self) -> None:
        """The user's own arguments, unchanged and last: of repeated flags llama-server takes the last."""
        for flag in self._by_hand.flags:
            self._argv += [flag.spelling, *flag.values]
            value = " ".join(flag.values) if flag.values else None
            self._reasons.append(Reason(flag.spelling, value, "given by hand after --"))


def asked_with(option: str, setting: object) -> str | None:
    """For ``give``: llamasup's own option where the user set it."""
    return None if setting is None else option


def unknown_flag(capabilities: Capabilities, flag: str, asked: str) -> UsageInvalid:
    """The error for something asked for by hand that the build lacks."""
    option = capabilities.find(flag)
    gone = option is not None and option.removed
    nearest = capabilities.nearest(flag)
    what = f"this llama-server ({capabilities.version}) {'no longer has' if gone else 'has no'} {flag}"
    if flag != asked:
        what = f"{asked} cannot be honoured: {what}"
    if nearest is not None:
        remedy = f"the nearest thing it has is {nearest}"
    else:
        remedy = f"leave {asked} out, or use another build with --runtime"
    return UsageInvalid(what, remedy=remedy)


# --- the user's own arguments --------------------------------------------------------------------

_OWNED: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"--host", "--port", "--reuse-port"}), "use llamasup's --host and --port: clients talk to it"),
    (frozenset({"--api-key", "--api-key-file"}), "use llamasup's --api-key-file or $LLAMASUP_API_KEY"),
    (
        frozenset({"-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"})
        | {"-hft", "--hf-token", "-dr", "--docker-repo"},
        "name the model as llamasup's MODEL argument",
    ),
    (frozenset({"-a", "--alias"}), "use llamasup's --alias: clients ask for the model by it"),
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
        "llamasup runs one model: start it once for each",
    ),
    (
        frozenset({"-h", "--help", "--usage", "--version", "--list-devices", "-cl", "--cache-list"})
        | {"--completion-bash"},
        "it prints and exits: run it with llama-server itself",
    ),
)


def read_extra(capabilities: Capabilities, extra: tuple[str, ...]) -> ExtraArgs:
    """The user's llama-server arguments, option by option. Raises UsageInvalid for what cannot work."""
    flags: list[ExtraFlag] = []
    words = list(extra)
    while words:
        spelling = words.pop(0)
        name, equals, _ = spelling.partition("=")
        if not spelling.startswith("-"):
            after = f" after {flags[-1].spelling}" if flags else ""
            raise UsageInvalid(
                f"{spelling!r}{after} is no option of llama-server", remedy="options start with -"
            )
        option = capabilities.find(name)
        _refuse_owned(name, option)
        if option is None or option.removed:
            raise _refusal(capabilities, name, option)
        if equals:
            raise UsageInvalid(
                f"llama-server does not read {spelling!r}", remedy=f"write {name} {spelling[len(name) + 1 :]}"
            )
        values, words = tuple(words[: option.arity]), words[option.arity :]
        if len(values) < option.arity:
            raise UsageInvalid(
                f"{spelling} needs a value ({option.argument})", remedy="add it after the flag"
            )
        flags.append(ExtraFlag(spelling, option, values))
    return ExtraArgs(tuple(flags))


def _refuse_owned(name: str, option: Option | None) -> None:
    spellings = {name.replace("_", "-"), *(option.spellings if option else ())}
    for owned, instead in _OWNED:
        if spellings & owned:
            raise UsageInvalid(f"{name} is llamasup's to set", remedy=instead)
    # "--fim-qwen-7b-default" and its like name a model, and a port of their own.
    if option is not None and "can download weights" in option.description:
        raise UsageInvalid(
            f"{name} makes llama-server download a model",
            remedy="name the model as llamasup's MODEL argument",
        )


def _refusal(capabilities: Capabilities, name: str, option: Option | None) -> UsageInvalid:
    error = unknown_flag(capabilities, name, name)
    if option is not None and option.removed_hint:
        return UsageInvalid(error.message, remedy=f"use {option.removed_hint}")
    return error


# The placeholders of llama-server's help: FNAME, FILE, PATH, DIR, FNAME:SCALE,..., JINJA_TEMPLATE_FILE.
_IS_PATH = re.compile(r"(?<![A-Z])(?:FNAME|FILE|PATH|DIR)(?![A-Z])")
_SCALE = re.compile(r":[-+]?[\d.]+$")


def with_absolute_paths(
    capabilities: Capabilities, extra: tuple[str, ...], resolve: Callable[[str], str]
) -> tuple[str, ...]:
    """The user's llama-server arguments with ``resolve`` applied to every path in them.

    Whether a path exists is not asked: llama-server then names the place that was meant.
    Raises UsageInvalid as ``read_extra`` does.
    """
    words: list[str] = []
    for flag in read_extra(capabilities, extra).flags:
        words.append(flag.spelling)
        for value, placeholder in zip(flag.values, flag.option.argument_words, strict=True):
            is_path = _IS_PATH.search(placeholder) is not None
            words.append(_resolved(value, placeholder, flag.option, resolve) if is_path else value)
    return tuple(words)


def _resolved(value: str, placeholder: str, option: Option, resolve: Callable[[str], str]) -> str:
    several = placeholder.endswith(",...") or "comma-separated" in option.description
    return ",".join(
        _one(part, resolve, scaled=":SCALE" in placeholder)
        for part in (value.split(",") if several else [value])
    )


def _one(path: str, resolve: Callable[[str], str], *, scaled: bool) -> str:
    scale = _SCALE.search(path) if scaled else None
    name, rest = (path[: scale.start()], scale[0]) if scale else (path, "")
    return resolve(name) + rest if name else path
