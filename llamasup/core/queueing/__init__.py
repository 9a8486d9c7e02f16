"""The requests that wait for a model, and the permits of its servers. It touches no connection.

Begin at ``request_queue.py`` and ``endpoint.py``.
"""
