"""A command line of llama-server → a model that llamasup plans (pure).

The build's ``--help`` explains the flags. The flags that the plan chooses are left to it, and all others are
kept in ``extra``, unless ``extra`` refuses them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from llamasup.core.llama_server.argv_builder import (
    ParsedOption,
    ParsedOptions,
    options_in_config,
    parse_options,
    read_extra,
)
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.settings.declaration import Place
from llamasup.core.system.text import split_row
from llamasup.errors import UsageInvalid
from llamasup.features.config_import.draft import Draft, is_secret

_SERVER: Final = re.compile(r"(?:.*[/\\])?llama-server(?:[-_.][^/\\]*)?")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_KEYS: Final = (
    {"--model": "path", "--hf-repo": "repo", "--model-url": "url", "--mmproj": "mmproj", "--rpc": "rpc"}
    | {"--model-draft": "draft_model", "--alias": "aliases", "--device": "devices", "--lora": "loras"}
    | {"--ctx-size": "ctx_size", "--sleep-idle-seconds": "ttl"}
)
_LISTS: Final = ("aliases", "devices", "rpc", "loras")
_PLANNED: Final = {
    name: why
    for names, why in (
        ("--threads --threads-batch --threads-draft --threads-batch-draft", "the cores decide"),
        ("--gpu-layers --gpu-layers-draft --fit", "as many layers as fit are on the GPU"),
        ("--flash-attn --cache-type-k --cache-type-v --cache-type-k-draft", "memory and speed decide"),
        ("--cache-type-v-draft --batch-size --ubatch-size --parallel", "memory and speed decide"),
        ("--kv-unified --cont-batching --metrics --slots --jinja", "every server that needs it gets it"),
        ("--host --port", "the server has a private socket, and `listen` is the address for clients"),
    )
    for name in names.split()
}


def server_words(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]] | None:
    """Split the command of a llama-server into the words up to its name, without ``env``, and its flags.

    None: another program, or a llama-server inside a container or behind another program.
    """
    at = next((number for number, word in enumerate(words) if _SERVER.fullmatch(word)), None)
    if at is None or (at and words[0] != "env") or not all(map(_ASSIGNMENT.fullmatch, words[1:at])):
        return None
    return words[min(1, at) : at + 1], words[at + 1 :]


def option_words(name: str, value: str, capabilities: Capabilities) -> Sequence[str]:
    """Return the flag for a name and a value of a preset or of the environment.

    Empty for a switch that is off and has no flag for it. An unknown name becomes an unknown flag.
    """
    given = next(iter(options_in_config([(name, value)], capabilities)), ParsedOption(None))
    if given.option is None:
        return f"--{name}", value
    if given.option.arity:
        return given.option.spellings[-1], value
    negations = given.option.negations
    is_on = given.on == {f"--{name}", f"-{name}"}.isdisjoint(negations)
    return [each for each in given.option.spellings if (each in negations) != is_on][-1:]


def put_server(draft: Draft, at: Place, words: Sequence[str], capabilities: Capabilities) -> None:
    """Put the settings that the flags of a llama-server mean, and comment on each flag."""
    given = ParsedOptions(parse_options(tuple(_with_values(words, capabilities)), capabilities))
    for each in _joined(given.options):
        text, value = shlex.join(each.words), each.values[0] if each.values else ""
        spellings = each.option.spellings if each.option else ()
        name = next((name for name in spellings if name in _KEYS or name in _PLANNED), "")
        key = _KEYS.get(name, "")
        if key == "ctx_size":
            _put_context(draft, at, text, value, given)
        elif key in _LISTS:
            draft.add((*at, key), split_row(value), f"from {text}")
        elif key:
            draft.put((*at, key), f"{value}s" if key == "ttl" else value, f"from {text}")
        elif "--no-mmproj" in spellings and not each.on:
            draft.put((*at, "mmproj"), "none", f"from {text}")
        elif name == "--gpu-layers" and value == "0":
            draft.put((*at, "gpu_layers"), 0, f"from {text}")
        elif name and each.on:
            draft.note(at, f"{text} → planned: {_PLANNED[name]}")
        elif why := _refusal(each.words, capabilities):
            draft.note(at, f"{each.words[0] if is_secret(each.words[0]) else text} → left out: {why}")
        else:
            extra = draft.config["models"][at[1]].get("extra", [])
            draft.put((*at, "extra"), [*extra, *each.words], f"from {text}")


def _put_context(draft: Draft, at: Place, text: str, value: str, given: ParsedOptions) -> None:
    texts = (value, given.value("--parallel") or "")
    size, slots = (int(each) if re.fullmatch("[0-9]{1,9}", each) else 0 for each in texts)
    if value == "0":
        draft.note(at, f"{text} → planned: the default is the largest context that model and memory allow")
    elif size and slots > 1 and not given.switch("--kv-unified"):
        draft.put((*at, "ctx_size"), size // slots, f"from {text}, for each of {slots} slots")
    else:
        draft.put((*at, "ctx_size"), size or value, f"from {text}")


def _with_values(words: Sequence[str], capabilities: Capabilities) -> Iterator[str]:
    """Add the value to a bare ``--flash-attn``, as builds before August 2025 had it."""
    for word, after in zip(words, (*words[1:], "-"), strict=False):
        yield word
        option = capabilities.find(word)
        if option is not None and "on" in option.allowed and after.startswith("-"):
            yield "on"


def _joined(parsed: Sequence[ParsedOption]) -> Sequence[ParsedOption]:
    """Join an unknown flag and the words after it, which are its values."""
    row: list[ParsedOption] = []
    for each in parsed:
        if row and each.option is None is row[-1].option and not re.match(r"-\D", each.words[0]):
            row[-1] = ParsedOption(None, words=(*row[-1].words, *each.words))
        else:
            row.append(each)
    return row


def _refusal(words: tuple[str, ...], capabilities: Capabilities) -> str:
    """Return why ``extra`` cannot have a flag; empty: it can."""
    try:
        read_extra(capabilities, words)
    except UsageInvalid as error:
        return f"{error.message.rstrip('.')}; {error.remedy.partition(';')[0]}"
    return ""
