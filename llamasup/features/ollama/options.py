"""Translates ``options`` of Ollama's API into parameters of llama-server, or says why not (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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

# Ollama's name → llama-server's (b11434), and the smallest and largest value.
WHOLE_NUMBERS: Final[Mapping[str, tuple[str, int, int]]] = {
    "num_keep": ("n_keep", -1, MAX_NUMBER),
    "seed": ("seed", -1, (1 << 32) - 1),
    "num_predict": ("n_predict", -1, MAX_NUMBER),
    "top_k": ("top_k", 0, MAX_NUMBER),
    "repeat_last_n": ("repeat_last_n", -1, MAX_NUMBER),
    "mirostat": ("mirostat", 0, 2),
}
NUMBERS: Final = (
    "top_p",
    "min_p",
    "typical_p",
    "temperature",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mirostat_tau",
    "mirostat_eta",
)
"""These have llama-server's names."""

OF_LLAMASUP: Final[Mapping[str, str]] = {
    "num_ctx": "ctx_size",
    "num_batch": "extra",
    "num_gpu": "gpu_layers",
    "main_gpu": "devices",
    "num_thread": "threads",
    "draft_num_predict": "draft_model",
    "numa": "extra",
    "use_mmap": "extra",
    "use_mlock": "extra",
    "low_vram": "gpu_layers",
    "f16_kv": "kv_type",
    "logits_all": "",
    "vocab_only": "",
    "embedding_only": "",
}
"""Options that change no text: fixed when a model is loaded, by these settings of llamasup, if any."""

REMOVED: Final = ("penalize_newline", "tfs_z")
"""Options of older versions of Ollama that change the text, and that llama-server does not have."""


def without_effect(fields: Fields, *, samples: bool = True) -> tuple[str, ...]:
    """The options that are accepted, although they change nothing. ``samples``: as for ``parameters``."""
    options = object_of(fields, "options")
    return tuple(name for name in options if is_given(options, name) and _is_idle(name, samples=samples))


def _is_idle(name: str, *, samples: bool) -> bool:
    return name in OF_LLAMASUP or (
        not samples and (name in NUMBERS or name in WHOLE_NUMBERS or name == "stop")
    )


def parameters(fields: Fields, *, samples: bool = True) -> dict[str, Any]:
    """The parameters of llama-server. ``samples``: False for embeddings, which take none. Raises Refused."""
    options = object_of(fields, "options")
    found: dict[str, Any] = {}
    for name in options:
        if not is_given(options, name) or _is_idle(name, samples=samples):
            continue
        if name in REMOVED:
            raise refusal(f"the option {name} does not exist in llama-server", "leave it out")
        if name in WHOLE_NUMBERS:
            own, least, most = WHOLE_NUMBERS[name]
            found[own] = integer(options, name, least, most)
        elif name in NUMBERS:
            found[name] = number(options, name)
        elif name == "stop":  # Ollama takes an array; some clients send one string
            found["stop"] = [text(options, "stop")] if is_text(options, "stop") else texts(options, "stop")
        else:
            raise refusal(f"there is no option {name[:40]!r}", "docs/ollama.md lists the options")
    return found
