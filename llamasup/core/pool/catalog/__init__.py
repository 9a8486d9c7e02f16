"""Find the models of a pool by name, and show them in the answers of the APIs.

It changes a pool only to apply a new registry. Begin with ``catalog.py``, the proxy's backend.
"""
