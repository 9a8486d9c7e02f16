"""LoRA adapters: which of those beside a model belong to it, and the flags that load them for who asks.

An adapter of another model ends llama-server at its start ("incorrect shape", b11434), so that in doubt none
is taken. Known are the architecture, the width of what it adapts, and, where its converter was told, the name
of the model that it was trained on.

They are loaded where the config says ``loras: [auto]``, and do nothing until a request asks for one
(``"lora": [{"id": 0, "scale": 1.0}]``). ``--lora-init-without-apply`` does not do that: requests get all
adapters at full scale just the same (b11434 [run], both runtimes); a scale of 0 does. Not without being
asked, because it costs every request: a slot reuses what it has computed with another adapter (#26207,
b11434 [run]), so that prompts must not be kept from one request to the next.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from llamasup.gguf.facts import ModelClass, ModelFacts
from llamasup.gguf.types import name_words
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.flags import CommandLine, ExtraArgs
from llamasup.llama_server.settings import Settings

__all__ = ["adapters_of", "give_adapters"]

_FLAG = "--lora-scaled"
_KEEP_NOTHING = "--no-cache-prompt"
_MAX = 8  # that one model loads: each takes memory, and clients have to tell them apart by number
_SERVED = frozenset({ModelClass.DECODER, ModelClass.ENCODER, ModelClass.RERANKER, ModelClass.ENCODER_DECODER})


def adapters_of(files: Mapping[str, ModelFacts], broken: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """Model → adapters, of the files of any number of folders; by path, in the order of their names.

    ``broken`` are the files that cannot be read: whose an adapter is may be in doubt for them, too.
    """
    folders: dict[PurePath, list[str]] = defaultdict(list)
    for path in (*files, *broken):
        folders[PurePath(path).parent].append(path)
    found: dict[str, list[str]] = defaultdict(list)
    for paths in folders.values():
        adapters = sorted(
            path for path in paths if path in files and files[path].model_class is ModelClass.LORA
        )
        models = [path for path in paths if path in files and files[path].model_class in _SERVED]
        unread = [path for path in paths if path not in files]
        for adapter in adapters:
            for model in _models_of(adapter, files, models, unread):
                found[model].append(adapter)
    return {model: tuple(adapters[:_MAX]) for model, adapters in found.items()}


def _models_of(
    adapter: str, files: Mapping[str, ModelFacts], models: Sequence[str], unread: Sequence[str]
) -> Sequence[str]:
    facts = files[adapter]
    # llama-server would read these letters as the end of the path.
    if not facts.adapted_length or "," in adapter or ":" in adapter:
        return ()
    fitting = [model for model in models if _fits(facts, files[model])]
    if facts.base_models:
        return [model for model in fitting if _is_named(facts, files[model], model)]
    # Nothing says whose it is: it is theirs if there is but one model, in however many quantizations.
    one = len({name_words(model) for model in models}) == 1 and not unread
    return fitting if one else ()


def _fits(adapter: ModelFacts, model: ModelFacts) -> bool:
    return (adapter.architecture, adapter.adapted_length, adapter.big_endian) == (
        model.architecture,
        model.embedding_length,
        model.big_endian,
    )


def _is_named(adapter: ModelFacts, model: ModelFacts, path: str) -> bool:
    """Whether the base that the adapter names is this model, by the model's own name or its file's."""
    own = _letters(model.name or ""), _letters(PurePath(path).stem)
    return any(
        (base := _letters(name)) and (base == own[0] or own[1].startswith(base))
        for name in adapter.base_models
    )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def give_adapters(
    line: CommandLine, capabilities: Capabilities, settings: Settings, extra_args: ExtraArgs
) -> bool:
    """Load the adapters that are there for requests, at a scale of 0. Whether any are loaded so."""
    if not settings.adapters:
        return False
    option = capabilities.find(_FLAG)
    if extra_args.has("--lora") or extra_args.has(_FLAG):
        line.leave_out(_FLAG, "adapters are given by hand")
        return False
    if option is None or option.arity != 1 or not capabilities.knows(_KEEP_NOTHING):
        line.leave_out(_FLAG, "this build cannot keep the adapters of one request from the next one's")
        return False
    scaled = ",".join(f"{path}:0" for path in settings.adapters)
    line.give(_FLAG, scaled, "for requests that ask for them, and else without effect", asked="loras")
    why = "a slot would answer with what it computed under another request's adapter"
    line.give(_KEEP_NOTHING, None, why, asked="loras")
    return True
