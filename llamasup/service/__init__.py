"""Puts the core and the features together, and serves until a stop is requested.

Options (``options.py``) make a specification, which ``Service`` (``hosting.py``) runs. ``run`` and ``wrap``
host one model (``models.py``), ``serve`` the models of a config (``configured_models.py``).
The command line and the Python API call these modules.
"""
