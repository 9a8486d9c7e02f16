"""Values that options of more than one table share, and the enumerators of the wheel they stand for."""

from __future__ import annotations

__all__ = ["KV_TYPES", "PRIORITIES"]

KV_TYPES = {
    word: f"GGML_TYPE_{word.upper()}"
    for word in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
}

PRIORITIES = {
    "-1": "GGML_SCHED_PRIO_LOW",
    "0": "GGML_SCHED_PRIO_NORMAL",
    "1": "GGML_SCHED_PRIO_MEDIUM",
    "2": "GGML_SCHED_PRIO_HIGH",
    "3": "GGML_SCHED_PRIO_REALTIME",
}
