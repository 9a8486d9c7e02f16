"""``options`` of a request in Ollama's API → parameters of llama-server, or the reason why not (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llamasup.ollama.fields import (
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

__all__ = ["NUMBERS", "OF_LLAMASUP", "REMOVED", "WHOLE_NUMBERS", "least_context", "parameters"]

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
}
"""Options that are fixed when a model is loaded, and the settings of llamasup that decide about them."""

REMOVED: Final = ("penalize_newline", "tfs_z", "logits_all", "vocab_only", "embedding_only")
"""Options of older versions of Ollama, which llama-server does not have."""


def least_context(fields: Fields) -> int | None:
    """``num_ctx``, which the context of a request must have at least."""
    return integer(object_of(fields, "options"), "num_ctx", 1)


def parameters(fields: Fields, *, samples: bool = True) -> dict[str, Any]:
    """The parameters of llama-server. ``samples``: False for embeddings, which take none. Raises Refused."""
    options = object_of(fields, "options")
    found: dict[str, Any] = {}
    for name in options:
        if not is_given(options, name) or name == "num_ctx":  # ``least_context``
            continue
        if name in OF_LLAMASUP:
            raise refusal(
                f"the option {name} is fixed when a model is loaded",
                f"leave it out; or set {OF_LLAMASUP[name]} of the model in llamasup's config",
            )
        if name in REMOVED:
            raise refusal(f"the option {name} does not exist in llama-server", "leave it out")
        if not samples:
            raise refusal(f"the option {name} has no effect on embeddings", "leave it out")
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
