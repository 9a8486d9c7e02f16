"""Test llamasup under faults and random load: ``python -m scripts.chaos NAME``.

``scripts/chaos/fuzz`` fuzzes what reads the bytes of strangers.
"""

from scripts.menu import run

run(
    "scripts.chaos",
    {
        "faults": "each fault on a real server: what clients see, and what is left",
        "models": "8 models in memory for 2 to 3, under random load and changes",
        "mutants": "whether the tests catch random one-line faults",
        "soak": "half an hour of mixed load with crashes, hangs and restarts",
        "streams": "a server killed in the middle of streams, again and again",
        "usage": "the usage of thousands of requests, compared with two other counts",
        "fuzz-http": "the proxy's HTTP against h11 (scripts/chaos/fuzz http)",
    },
)
