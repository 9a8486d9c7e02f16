"""LoRA adapters: which adapters in a folder belong to which model, and the flags that load them.

An adapter of another model ends llama-server at its start ("incorrect shape", b11434), so a doubtful adapter
is not used. Its header shows the architecture, the width of the adapted layers, and sometimes the name of the
model that it was trained on.

Adapters are loaded if the config has ``loras: [auto]``, and apply only to requests that name one
(``"lora": [{"id": 0, "scale": 1.0}]``). They are loaded at a scale of 0, because
``--lora-init-without-apply`` still applies all of them to every request (b11434 [run], both runtimes). They
cost every request some time: a slot reuses what it has computed with another adapter (#26207, b11434 [run]),
so prompts must not be kept from one request to the next. For that reason, they are not the default.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from llamasup.core.gguf.facts import ModelClass, ModelFacts, is_served
from llamasup.core.gguf.tensor_types import name_words
from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.inputs import PlanInputs

_FLAG = "--lora-scaled"
_KEEP_NOTHING = "--no-cache-prompt"
_MAX = 8  # per model: each takes memory, and clients name them by number


def adapters_of(files: Mapping[str, ModelFacts], broken: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """The adapters of each model, as sorted paths, among the files of any number of folders.

    ``broken`` are unreadable files: an adapter could belong to one of them.
    """
    folders: dict[PurePath, list[str]] = defaultdict(list)
    for path in (*files, *broken):
        folders[PurePath(path).parent].append(path)
    found: dict[str, list[str]] = defaultdict(list)
    for paths in folders.values():
        adapters = sorted(
            path for path in paths if path in files and files[path].model_class is ModelClass.LORA
        )
        models = [path for path in paths if path in files and is_served(files[path])]
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
    # Without a base model in its header, an adapter belongs to the folder's only model, if there is one.
    is_only_model = len({name_words(model) for model in models}) == 1 and not unread
    return fitting if is_only_model else ()


def _fits(adapter: ModelFacts, model: ModelFacts) -> bool:
    return (adapter.architecture, adapter.adapted_length, adapter.big_endian) == (
        model.architecture,
        model.embedding_length,
        model.big_endian,
    )


def _is_named(adapter: ModelFacts, model: ModelFacts, path: str) -> bool:
    """Whether a base model in the adapter's header is this model, by its own name or its file's."""
    own = _letters(model.name or ""), _letters(PurePath(path).stem)
    return any(
        (base := _letters(name)) and (base == own[0] or own[1].startswith(base))
        for name in adapter.base_models
    )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def give_adapters(line: CommandLine, inputs: PlanInputs) -> bool:
    """Load the adapters of the settings at a scale of 0. Returns whether any are loaded."""
    adapters = inputs.settings.adapters
    if not adapters:
        return False
    why_not = _why_not(inputs.capabilities, inputs.extra_args)
    if why_not is not None:
        line.leave_out(_FLAG, why_not)
        return False
    scaled = ",".join(f"{path}:0" for path in adapters)
    line.give(_FLAG, scaled, "only requests that name an adapter use it", asked="loras")
    why = "a slot would reuse what it computed with the adapter of another request"
    line.give(_KEEP_NOTHING, None, why, asked="loras")
    return True


def _why_not(capabilities: Capabilities, extra_args: ExtraArgs) -> str | None:
    if extra_args.has("--lora") or extra_args.has(_FLAG):
        return "adapters are set after --"
    option = capabilities.find(_FLAG)
    if option is None or option.arity != 1 or not capabilities.knows(_KEEP_NOTHING):
        return "this build cannot separate the adapters of one request from those of the next"
    return None
