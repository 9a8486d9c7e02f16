"""Access to the operating system: processes, files, hardware, timers, and text for terminals.

No module here knows llama-server or models. Begin with ``native`` (what differs between systems) and
``process/spawn.py``.
"""
