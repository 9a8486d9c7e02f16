"""Compare policies in simulated time: ``python -m scripts.simulate NAME``."""

from scripts.menu import run

run(
    "scripts.simulate",
    {
        "affinity": "which replica serves a turn of a conversation",
        "fleet": "which of up to 100 nodes serves a turn of a conversation",
        "residency": "which model is evicted",
    },
)
