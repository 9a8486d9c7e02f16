"""The words of llama-server and other programs for what llamasup has an option, and how to say it here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llamasup.core.llama_server.help_text import Capabilities

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
