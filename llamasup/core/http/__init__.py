"""Knowledge of HTTP: heads, routes, bodies, server-sent events, addresses and errors.

The relay of requests is ``core/proxy``. Begin with ``heads.py`` and ``routes.py``.
"""
