"""The declarations of all settings, each with its kind, its description and its default.

No file is read here. Begin at ``model.py``.
"""
