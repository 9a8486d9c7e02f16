"""The RPC workers of a model, which lend it the memory of other machines, and the TLS tunnels to them.

Begin with ``workers.py``.
"""
