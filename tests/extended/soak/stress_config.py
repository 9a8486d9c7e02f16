"""The config of a stress run and its random changes. Pure: depends only on the random generator."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from tests.extended.soak.stress_models import MODELS, settings_of

__all__ = ["BROKEN", "MAX_QUEUED", "StressConfig", "edited"]

MIN_MODELS = 6
MAX_QUEUED = 16
"""More than the clients have requests, and fewer than the greedy key."""
MOVING_ALIAS = "best"
"""An alias that moves from model to model."""

BROKEN: Sequence[str] = (
    "models: [",
    "modles: {}\n",
    "models: {m0: {path: missing/m0.gguf}}\n",
    "models: {m0: {path: demo, ctx_size: many}}\n",
    "models: {a: {path: demo, aliases: [same]}, b: {path: demo, aliases: [same]}}\n",
    "models: {m0: &anchor {path: demo}, m1: *anchor}\n",
    "",
)
"""Invalid configs: llamasup refuses each of them."""


class StressConfig(Struct, frozen=True):
    """``models``: the served models with their settings. ``aliases``: alias to model."""

    folder: Path
    budget_bytes: int
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    group: tuple[str, ...] = ()
    max_loaded: int | None = None
    swap_after: str = "1s"

    @staticmethod
    def first(folder: Path, budget_bytes: int) -> StressConfig:
        aliases = {f"alias-{model}": model for model in MODELS} | {MOVING_ALIAS: MODELS[0]}
        models = {model: settings_of(model) for model in MODELS}
        return StressConfig(folder, budget_bytes, models, aliases)

    @property
    def names(self) -> Mapping[str, str]:
        """Every served name with its model."""
        aliases = {name: model for name, model in self.aliases.items() if model in self.models}
        return {model: model for model in self.models} | aliases

    @property
    def path(self) -> Path:
        return self.folder / "config.yaml"

    def path_of(self, model: str) -> Path:
        return self.folder / f"{model}.gguf"

    def text(self) -> str:
        """The config as JSON, which is also YAML."""
        names = self.names
        models = {
            model: {
                "path": str(self.path_of(model)),
                "aliases": [name for name, of in names.items() if of == model and name != model],
                **settings,
            }
            for model, settings in self.models.items()
        }
        group = [model for model in self.group if model in self.models]
        settings: dict[str, Any] = {
            "auth": {"api_key_file": str(self.folder / "keys")},
            "memory": {"ram": f"{self.budget_bytes >> 10}KiB"},
            "swap_after": self.swap_after,
            "defaults": {"wait_timeout": "60s", "drain_timeout": "20s", "max_queued": MAX_QUEUED},
            "models": models,
            **({"groups": {"one-at-a-time": group}} if group else {}),
            **({"max_loaded": self.max_loaded} if self.max_loaded else {}),
        }
        return json.dumps(settings, indent=1)


def edited(config: StressConfig, rng: random.Random) -> tuple[str, StressConfig]:
    """Make one random change. Returns its name and the new config."""
    what, change = rng.choice(_EDITS)
    return what, change(config, rng)


def _add_or_remove(config: StressConfig, rng: random.Random) -> StressConfig:
    unused = [model for model in MODELS if model not in config.models]
    if unused and (len(config.models) <= MIN_MODELS or rng.random() < 0.5):
        model = rng.choice(unused)
        return replace(config, models={**config.models, model: settings_of(model)})
    model = rng.choice(sorted(config.models))
    return replace(
        config, models={name: settings for name, settings in config.models.items() if name != model}
    )


def _alias(config: StressConfig, rng: random.Random) -> StressConfig:
    model = rng.choice(MODELS)
    aliases = dict(config.aliases)
    if aliases.pop(f"alias-{model}", None) is None:
        aliases[f"alias-{model}"] = model
    return replace(config, aliases=aliases)


def _move_alias(config: StressConfig, rng: random.Random) -> StressConfig:
    return replace(config, aliases={**config.aliases, MOVING_ALIAS: rng.choice(MODELS)})


def _ttl(config: StressConfig, rng: random.Random) -> StressConfig:
    """Set or remove the TTL of a model."""
    ttl = rng.choice(("500ms", "2s", "30s"))
    model = rng.choice(sorted(model for model, settings in config.models.items() if not settings.get("pin")))
    settings = {key: value for key, value in config.models[model].items() if key != "ttl"}
    if settings == config.models[model]:
        settings["ttl"] = ttl
    return replace(config, models={**config.models, model: settings})


def _context(config: StressConfig, rng: random.Random) -> StressConfig:
    return _with_setting(config, rng, parallel=rng.choice((1, 2, 3)))


def _preload(config: StressConfig, rng: random.Random) -> StressConfig:
    return _with_setting(config, rng, preload=rng.random() < 0.5)


def _pin(config: StressConfig, rng: random.Random) -> StressConfig:
    """Pin at most one model outside the group, because all other models must stay loadable. A pinned model
    cannot have a ``ttl``.
    """
    free = [
        model
        for model, settings in config.models.items()
        if model not in config.group and "ttl" not in settings
    ]
    pinned = rng.choice([*sorted(free), ""])
    models = {model: {**settings, "pin": model == pinned} for model, settings in config.models.items()}
    return replace(config, models=models)


def _group(config: StressConfig, rng: random.Random) -> StressConfig:
    free = [model for model in MODELS if not config.models.get(model, {}).get("pin")]
    return replace(config, group=tuple(sorted(rng.sample(free, rng.choice((0, 2, 3))))))


def _limits(config: StressConfig, rng: random.Random) -> StressConfig:
    """Allow two loaded models, or as many as fit into memory."""
    swap_after = rng.choice(("100ms", "500ms", "2s"))
    return replace(config, max_loaded=rng.choice((2, None)), swap_after=swap_after)


def _with_setting(config: StressConfig, rng: random.Random, **settings: Any) -> StressConfig:
    model = rng.choice(sorted(config.models))
    return replace(config, models={**config.models, model: {**config.models[model], **settings}})


_EDITS = (
    ("model added or removed", _add_or_remove),
    ("model added or removed", _add_or_remove),
    ("alias added or removed", _alias),
    ("alias moved", _move_alias),
    ("ttl", _ttl),
    ("parallel", _context),
    ("preload", _preload),
    ("pin", _pin),
    ("group", _group),
    ("max_loaded and swap_after", _limits),
)
