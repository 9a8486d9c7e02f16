"""Facts for the planning tests: builds by their own help texts, models, a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from llamasup.core.gguf.facts import ChatTemplate, ModelClass, ModelFacts
from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.llama_server.help_text import Capabilities, Option, parse_help
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.plan import LaunchPlan, PlanFacts, child_address_kind, plan
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.facts import Hardware
from tests.kit.paths import FIXTURES

HELP = FIXTURES / "help"
BUILDS = tuple(sorted(path.stem for path in HELP.glob("*.txt")))
OLD, MIDDLE, JULY, NEW = "0.2.90", "0.3.16", "b10068", "b11434"  # 2024-08, 2025-08, 2026-07, 2026-11
GIB = 1 << 30
GPU = Device("CUDA0", "a GPU", 24 * GIB, 22 * GIB)
SMALL_GPU = Device("CUDA0", "a GPU", 24 * GIB, 4 * GIB)  # holds a part of the layers


@cache
def _options(build: str) -> tuple[Option, ...]:
    return parse_help((HELP / f"{build}.txt").read_text())


def capabilities(build: str, *devices: Device) -> Capabilities:
    return Capabilities(build, _options(build), devices)


def from_help(text: str) -> Capabilities:
    """A build that lists just this."""
    return Capabilities("made up", parse_help(text), ())


def model(**changes: Any) -> ModelFacts:
    """An 8B decoder with grouped-query attention, as changed. With its short context, a plan gives each slot
    the whole of it.
    """
    layers = changes.get("layers", 32)
    weights_bytes = changes.get("weights_bytes", 5 * GIB)
    facts: dict[str, Any] = {
        "architecture": "llama",
        "model_class": ModelClass.DECODER,
        "name": "Example 8B",
        "parameters": 8_000_000_000,
        "quantization": "Q4_K_M",
        "layers": layers,
        "context_length": 8192,
        "embedding_length": 4096,
        "feed_forward_lengths": (14336,) * layers,
        "head_counts": (32,) * layers,
        "head_counts_kv": (8,) * layers,
        "key_length": 128,
        "value_length": 128,
        "sliding_window": None,
        "vocab_size": 128256,
        "chat_template": ChatTemplate(present=True, tools=True, system=True),
        "pooling": None,
        "file_bytes": 5 * GIB,
        "expected_bytes": 5 * GIB,
        "weights_bytes": weights_bytes,
        "layer_bytes": (weights_bytes // layers,) * layers,
    }
    return ModelFacts(**(facts | changes))


LONG = model(context_length=1 << 20)


def bert(model_class: ModelClass = ModelClass.ENCODER, **changes: Any) -> ModelFacts:
    facts: dict[str, Any] = {
        "architecture": "bert",
        "model_class": model_class,
        "layers": 12,
        "context_length": 512,
        "embedding_length": 384,
        "head_counts": (12,) * 12,
        "head_counts_kv": (12,) * 12,
        "kv_layers": (False,) * 12,
        "key_length": 32,
        "value_length": 32,
        "chat_template": ChatTemplate(),
        "pooling": "rank" if model_class is ModelClass.RERANKER else "mean",
        "weights_bytes": 60 << 20,
    }
    return model(**(facts | changes))


def machine(**changes: Any) -> Hardware:
    """A desktop: eight cores, 32 GiB of which 28 are free, no special rights."""
    facts: dict[str, Any] = {
        "platform": "linux",
        "cpus_allowed": 16,
        "physical_cores": 8,
        "cpu_quota": None,
        "memory_total_bytes": 32 * GIB,
        "memory_available_bytes": 28 * GIB,
        "memlock_limit_bytes": 8 << 20,
        "may_raise_priority": False,
    }
    return Hardware(**(facts | changes))


def planned(
    build: str | Capabilities = NEW,
    facts: ModelFacts | None = None,
    hardware: Hardware | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    address: Address | None = None,
    **rest: Any,
) -> LaunchPlan:
    """A plan; keywords that name a setting go into ``Settings``, the others to ``plan``.

    ``projector`` are the facts of the file that the setting ``mmproj`` names.
    """
    known = capabilities(build) if isinstance(build, str) else build
    names = Settings.__struct_fields__
    settings = Settings(**{name: rest.pop(name) for name in list(rest) if name in names})
    if address is None:
        unix = child_address_kind(known, platform="linux") == "unix"
        address = UnixAddress("/run/llamasup/1/a.sock") if unix else TcpAddress("127.0.0.1", 40001)
    options: dict[str, Any] = {
        "command": ("/opt/llama/llama-server",),
        "kind": "binary",
        "capabilities": known,
        "model": facts or model(),
        "model_path": "/models/example-8b.gguf",
        "hardware": hardware or machine(),
        "settings": settings,
        "mmproj": rest.pop("projector", None),
        "address": address,
        "environ": environ or {"PATH": "/usr/bin"},
        "config_home": "/run/llamasup/1/config",
        "api_key": None if isinstance(address, UnixAddress) else "sk-child",
        "api_key_file": None if isinstance(address, UnixAddress) else "/run/llamasup/1/key",
    }
    return plan(PlanFacts(**(options | rest)))


def ladder(*args: Any, **rest: Any) -> Callable[[PlanLimits], LaunchPlan]:
    """A function from bounds to the plan of ``planned``."""

    def candidate(bounds: PlanLimits) -> LaunchPlan:
        return planned(*args, **rest, bounds=bounds)

    return candidate


def needed_bytes(made: LaunchPlan) -> int:
    """Host memory, without what takes only a part of the memory that is left."""
    elastic = ("prompt cache", "checkpoints")
    return sum(part.host_bytes for part in made.memory.parts if part.kind not in elastic)


def value(made: LaunchPlan, flag: str) -> str | None:
    """The value of the flag on the command line."""
    return made.argv[made.argv.index(flag) + 1] if flag in made.argv else None


def reason(made: LaunchPlan, flag: str) -> str:
    return next(each.reason for each in made.reasons if each.flag == flag)
