"""Conversations (slots) that are saved on disk while their model is not loaded.

``policy.py`` decides which ones may be restored; ``store.py`` reads and writes them.
"""
