"""The inputs of each decision about a plan: the facts, and the starting values of the profile (pure).

docs/planning.md gives the reasons for the starting values, with the measurements of scripts/bench/plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.argv_builder import ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.measured.load_history import LoadHistory
from llamasup.core.settings.model import Profile, Settings
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.child import RuntimeKind
from llamasup.errors import UsageInvalid

# Since August 2026, YaRN raises the limit of a request (#28030). This flag is a little older.
_BEFORE_YARN_EXTENDS = "--kv-unified-per-slot"

_NO_HISTORY = LoadHistory()


class Preferences(Struct, frozen=True):
    """The starting values of a plan; memory, the model and the build can reduce them."""

    ctx_size: int = 8192  # tokens per request while all slots are busy
    parallel: int = 4  # as llama-server's own "auto"
    shared_cells: bool = False  # one pool of KV cells for all slots, whatever their number of tokens
    grows: bool = True  # a longer context for one request, as far as the memory holds it comfortably
    batch: int = 2048
    ubatch: int = 512
    kv_type_on_cpu: str = "f16"
    kv_types_on_device: tuple[str, ...] = (
        "f16",
        "q8_0",
    )  # the first with which all layers fit
    spin_count: int | None = 3000  # of OpenMP's threads at a barrier; None: its default, 300,000
    prompt_cache: bool = True
    checkpoints: bool = True  # all that memory allows; False: none, or few for recurrent states
    lock: bool = True
    repack: bool = True  # rewrite the weights for this CPU, which makes a second copy
    server_defaults: bool = False  # llama-server chooses everything that the user does not set


_PREFERENCES: Mapping[Profile | None, Preferences] = MappingProxyType(
    {
        None: Preferences(),
        "latency": Preferences(parallel=1),
        "throughput": Preferences(ctx_size=4096, parallel=8, shared_cells=True, spin_count=1000),
        "memory": Preferences(
            ctx_size=4096,
            parallel=1,
            grows=False,
            ubatch=128,
            kv_type_on_cpu="q8_0",
            kv_types_on_device=("q8_0",),
            prompt_cache=False,
            checkpoints=False,
            lock=False,
            repack=False,
        ),
        "plain": Preferences(server_defaults=True, grows=False, kv_types_on_device=("f16",), spin_count=None),
    }
)


class PlanInputs(Struct, frozen=True):
    """The facts and wishes that decide every size, and most flags.

    ``extra_args`` are the flags of the user and of ``llamasup tune`` for llama-server. Derived from the other
    facts are ``prefers``, the class that the model is served as (``serves``), and the context length of
    ``model``: that which llama-server takes it to be trained for.
    """

    capabilities: Capabilities
    model: ModelFacts
    hardware: Hardware
    settings: Settings
    extra_args: ExtraArgs
    bounds: PlanLimits
    kind: RuntimeKind = "binary"
    runtime: str = ""  # the build, as the history names it
    draft: ModelFacts | None = None  # of the file that the user set
    projector: ModelFacts | None = None  # that llama-server will load
    history: LoadHistory = _NO_HISTORY
    shared: bool = False  # other models need the spare memory
    prefers: Preferences = Preferences()
    serves: ModelClass = ModelClass.DECODER

    def __post_init__(self) -> None:
        model, bounds = self.model, self.bounds
        prefers = _PREFERENCES[self.settings.profile]
        if not model.known:
            prefers = replace(prefers, grows=False, kv_type_on_cpu="f16", kv_types_on_device=("f16",))
        if prefers.server_defaults:  # it chooses the sizes
            bounds = PlanLimits(bare=bounds.bare, why=bounds.why if bounds.bare else "")
        longest = _longest_context(self.capabilities, model, self.extra_args)
        force_setattr(self, "model", replace(model, context_length=longest))
        force_setattr(self, "serves", served_as(model, self.extra_args))
        force_setattr(self, "prefers", prefers)
        force_setattr(self, "bounds", bounds)

    @property
    def sets_length(self) -> bool:
        """Whether the user set the length of the context."""
        return self.settings.ctx_size is not None or self.extra_args.has("--ctx-size")


def served_as(model: ModelFacts, extra_args: ExtraArgs) -> ModelClass:
    """Return the class that the model is served as: its own, or the class that the user set after ``--``."""
    if extra_args.switch("--rerank"):
        return ModelClass.RERANKER
    if extra_args.switch("--embedding"):
        return ModelClass.RERANKER if extra_args.value("--pooling") == "rank" else ModelClass.ENCODER
    return model.model_class


def _longest_context(capabilities: Capabilities, model: ModelFacts, extra_args: ExtraArgs) -> int:
    """The longest context that llama-server takes ``model`` to be trained for, after the user's flags."""
    longest = model.context_length
    for given in extra_args.all("--override-kv"):
        for setting in given.values[0].split(","):
            key, _, value = setting.partition("=int:")
            if key == f"{model.architecture}.context_length" and value.isdecimal():
                longest = int(value)
    if extra_args.value("--rope-scaling") != "yarn" or not capabilities.knows(_BEFORE_YARN_EXTENDS):
        return longest
    with suppress(ValueError, OverflowError):  # llama-server reports them
        factor = float(extra_args.value("--rope-scale") or 1)
        longest = max(longest, int(factor * (extra_args.number("--yarn-orig-ctx") or longest)))
    return longest


def absolute_path(setting: str, path: str) -> str:
    """Return ``path``, which cannot be read as a flag. The caller has made it absolute: that is an effect."""
    if not PurePath(path).root:
        raise ValueError(f"the path of {setting} must be absolute here: {path!r}")
    return path


def out_of_range(option: str, value: object, allowed: str) -> UsageInvalid:
    """Make the error for a number that is not ``allowed``."""
    return UsageInvalid(f"{option} {value} is out of range", remedy=f"give {allowed}")
