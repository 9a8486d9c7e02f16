"""Counts what each model, key and day has used: requests, tokens, slot seconds and energy (docs/usage.md).

Begin with ``recorder``, which gets each finished request; ``store`` keeps the sums in a SQLite file.
"""
