"""Measure what llamasup costs and gains: ``python -m scripts.bench NAME``."""

from scripts.menu import run

run(
    "scripts.bench",
    {
        "batch": "batches beside crashes and other clients; their speed and memory",
        "bodies": "the memory of the proxy while clients send large bodies",
        "bundle": "the start of the bundle, compared with Python and llama-server alone",
        "console": "what an open page of the console costs",
        "drafts": "the gain of speculative decoding, by the length of the drafts",
        "eta": "how good the estimated end of a load is",
        "fleet": "a fleet on Ray: the hop, replicas, starts, the cache",
        "give-way": "how long llamasup tune takes to yield to a request",
        "idle": "CPU and memory of an idle llamasup",
        "inspect": "reading model files and folders, with and without the cache",
        "ollama": "the CPU time for a token through Ollama's API",
        "plan": "llama-server's defaults, compared with llamasup's plan and profiles",
        "proxy": "CPU and latency of the proxy, compared with nginx",
        "repair": "unusable answers and refused conversations, without and with the repair",
        "slots": "the second turn of a conversation with kept slots, after a reload",
        "start": "the start of llamasup run, and of the commands that people wait for",
        "swap": "the first token of an unloaded model, and of one that evicts another",
        "tune": "what llamasup tune finds, and how often it is wrong",
    },
)
