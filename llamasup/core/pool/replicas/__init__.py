"""Serve one model with several processes: choose the process whose cache has the conversation.

The package starts no processes. Begin with ``replica_set.py``.
"""
