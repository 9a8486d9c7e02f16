"""The command line of ``llamasup run`` that means given settings: what the options say, written back.

Only what was set by hand is written; what is left out keeps the default of the version that runs it.
"""

from __future__ import annotations

from llamasup.core.settings import Settings

__all__ = ["run_arguments"]

_OF_SETTINGS = {
    "alias": "--alias",
    "ctx_size": "--ctx-size",
    "parallel": "--parallel",
    "gpu_layers": "--gpu-layers",
    "threads": "--threads",
    "kv_type": "--kv-type",
    "flash_attn": "--flash-attn",
    "draft_model": "--draft-model",
    "mmproj": "--mmproj",
    "profile": "--profile",
}


def run_arguments(model: str, settings: Settings, options: dict[str, str], switches: list[str]) -> list[str]:
    """``options`` and ``switches`` are those of ``run`` that do not describe the model."""
    words = ["run", model]
    for field, option in _OF_SETTINGS.items():
        value = getattr(settings, field)
        if value is not None:
            words += [option, str(value)]
    if not settings.check_memory:
        words.append("--no-memory-check")
    for option, text in options.items():
        words += [option, text]
    words += switches
    return [*words, "--", *settings.extra] if settings.extra else words
