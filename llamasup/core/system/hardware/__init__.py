"""The CPUs, memory and GPUs that this process may use, and how much of each a process uses.

``probe.hardware`` reads the limits; ``facts.py`` and ``devices.py`` parse what it read.
"""
