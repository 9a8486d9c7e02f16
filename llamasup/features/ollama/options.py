"""Translates ``options`` of Ollama's API into parameters of llama-server, or says why not (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from llamasup.features.ollama.fields import (
    MAX_NUMBER,
    Fields,
    integer,
    is_given,
    is_text,
    number,
    object_of,
    refusal,
    text,
    texts,
)


class Whole(Struct, frozen=True):
    """A whole number. ``own`` is llama-server's name (b11434)."""

    own: str
    least: int
    most: int = MAX_NUMBER


class Number(Struct, frozen=True):
    """A number that has the same name in llama-server."""


class Stops(Struct, frozen=True):
    """The texts that end an answer. Ollama takes an array; some clients send one string."""


class Fixed(Struct, frozen=True):
    """An option that changes no text: ``setting`` of llamasup fixes it when the model is loaded, if any."""

    setting: str = ""


class Removed(Struct, frozen=True):
    """An option of older versions of Ollama that changes the text, and that llama-server does not have."""


OPTIONS: Final[Mapping[str, Whole | Number | Stops | Fixed | Removed]] = {
    "num_keep": Whole("n_keep", -1),
    "seed": Whole("seed", -1, (1 << 32) - 1),
    "num_predict": Whole("n_predict", -1),
    "top_k": Whole("top_k", 0),
    "repeat_last_n": Whole("repeat_last_n", -1),
    "mirostat": Whole("mirostat", 0, 2),
    "top_p": Number(),
    "min_p": Number(),
    "typical_p": Number(),
    "temperature": Number(),
    "repeat_penalty": Number(),
    "presence_penalty": Number(),
    "frequency_penalty": Number(),
    "mirostat_tau": Number(),
    "mirostat_eta": Number(),
    "stop": Stops(),
    "num_ctx": Fixed("ctx_size"),
    "num_batch": Fixed("extra"),
    "num_gpu": Fixed("gpu_layers"),
    "main_gpu": Fixed("devices"),
    "num_thread": Fixed("threads"),
    "draft_num_predict": Fixed("draft_model"),
    "numa": Fixed("extra"),
    "use_mmap": Fixed("extra"),
    "use_mlock": Fixed("extra"),
    "low_vram": Fixed("gpu_layers"),
    "f16_kv": Fixed("kv_type"),
    "logits_all": Fixed(),
    "vocab_only": Fixed(),
    "embedding_only": Fixed(),
    "penalize_newline": Removed(),
    "tfs_z": Removed(),
}


def without_effect(fields: Fields, *, samples: bool = True) -> tuple[str, ...]:
    """Return the options that are accepted, although they change nothing. ``samples``: as for
    ``parameters``.
    """
    options = object_of(fields, "options")
    return tuple(name for name in options if is_given(options, name) and _is_idle(name, samples=samples))


def setting_of(name: str) -> str:
    """Return the setting of llamasup that fixes an option; empty if there is none."""
    option = OPTIONS.get(name)
    return option.setting if isinstance(option, Fixed) else ""


def _is_idle(name: str, *, samples: bool) -> bool:
    option = OPTIONS.get(name)
    return isinstance(option, Fixed) or (not samples and isinstance(option, Whole | Number | Stops))


def parameters(fields: Fields, *, samples: bool = True) -> dict[str, Any]:
    """Return the parameters of llama-server. ``samples``: False for embeddings, which take none. Raises
    Refused.
    """
    options = object_of(fields, "options")
    found: dict[str, Any] = {}
    for name in options:
        if not is_given(options, name) or _is_idle(name, samples=samples):
            continue
        match OPTIONS.get(name):
            case Whole(own, least, most):
                found[own] = integer(options, name, least, most)
            case Number():
                found[name] = number(options, name)
            case Stops():
                found[name] = [text(options, name)] if is_text(options, name) else texts(options, name)
            case Removed():
                raise refusal(f"the option {name} does not exist in llama-server", "leave it out")
            case _:
                raise refusal(f"there is no option {name[:40]!r}", "docs/ollama.md lists the options")
    return found
