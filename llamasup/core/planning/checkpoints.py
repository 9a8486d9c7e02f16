"""The context checkpoints of llama-server: how many of each slot, and their memory.

A recurrent state, or a sliding window, has only the end of a conversation. So llama-server copies it to host
memory from time to time. Without a copy, a changed last message makes it read the whole prompt again. Its 32
copies for each slot are 18.7 GiB for Qwen3.8-27B (unslothai/unsloth#11073).
"""

from __future__ import annotations

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.argv_builder import CommandLine
from llamasup.core.planning.inputs import SizeInputs
from llamasup.core.planning.memory.estimate import MemoryEstimate
from llamasup.core.planning.memory.kv_cache import ContextShape, checkpoint_bytes
from llamasup.core.system.text import memory_text

_FLAG = "--ctx-checkpoints"
# Going back 50 tokens needs 4 in b10068, and 8 in builds of autumn 2026 [run].
_ENOUGH = 8


class Checkpoints(Struct, frozen=True):
    """The checkpoints of each slot (``count``; None: llama-server's own number).

    ``size_bytes`` is the most memory that the checkpoints of all slots take.
    """

    count: int | None = None
    size_bytes: int = 0
    why: str = ""


def decide_checkpoints(
    inputs: SizeInputs, memory: MemoryEstimate, shape: ContextShape, *, shared: bool = False
) -> Checkpoints:
    """Choose as many checkpoints as a quarter of the spare host memory holds.

    ``memory`` includes neither checkpoints nor the prompt cache. ``shared`` is true if other models need the
    spare memory.
    """
    capabilities, model, prefers = inputs.capabilities, inputs.model, inputs.prefers
    own = capabilities.default_number(_FLAG)
    if own is None and prefers.checkpoints:
        return Checkpoints()  # the build has none
    usual = own or 0
    each = checkpoint_bytes(model, shape) if inputs.serves is ModelClass.DECODER else 0
    asked = inputs.extra_args.number(_FLAG)
    if asked is not None:
        return Checkpoints(None, max(0, asked) * each)
    if prefers.server_defaults:
        return Checkpoints(None, usual * each)
    recurs = model.recurrent is not None or not model.known
    if not prefers.checkpoints:
        if not recurs:
            return Checkpoints(0, 0, "this profile saves the memory of context checkpoints")
        usual = min(usual, _ENOUGH)
    spare_bytes = memory.spare_host_bytes
    most_bytes = min(spare_bytes, memory.total_bytes) // 4 if shared else spare_bytes // 4
    count = min(usual, most_bytes // each) if each else usual
    if count == own:
        return Checkpoints(None, count * each)
    why = "llama-server continues changed prompts from them"
    if each:
        why += f"; all take at most {memory_text(count * each)}"
    return Checkpoints(count, count * each, why)


def give_checkpoints(line: CommandLine, checkpoints: Checkpoints) -> None:
    if checkpoints.count is not None:
        line.give(_FLAG, checkpoints.count, checkpoints.why, otherwise="this build has no checkpoints")
