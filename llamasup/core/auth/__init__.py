"""API keys: their file, their rights and their limits. Decisions about requests are in ``proxy/``.

Begin at ``keys.py``.
"""
