"""The inputs from which the sizes of a plan are chosen (pure)."""

from __future__ import annotations

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.argv_builder import ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.profiles import Preferences
from llamasup.core.settings.model import Settings


class SizeInputs(Struct, frozen=True):
    """The facts and wishes that decide every size.

    ``extra_args`` are the flags of the user and of ``llamasup tune`` for llama-server.
    """

    capabilities: Capabilities
    model: ModelFacts
    serves: ModelClass
    settings: Settings
    extra_args: ExtraArgs
    prefers: Preferences
    bounds: PlanLimits

    @property
    def sets_length(self) -> bool:
        """Whether the user set the length of the context."""
        return self.settings.ctx_size is not None or self.extra_args.has("--ctx-size")
