"""The CPUs, memory and GPUs that this process may use, and what a process uses of them.

``probe.hardware`` reads the limits; ``facts.py`` and ``devices.py`` parse what it read.
"""
