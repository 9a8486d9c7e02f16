"""Starts, watches and kills child processes, and cleans up after a llamasup that was killed.

It decides nothing about when to start or stop: ``core/supervision`` does. Begin with ``spawn.py``.
"""
