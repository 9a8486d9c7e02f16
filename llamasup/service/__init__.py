"""Puts the core and the features together, and serves until a stop is requested.

``run.py`` serves one model, ``serve.py`` the models of a config. ``hosting.py`` has what both share:
listeners, proxy, control API and observers. The command line and the Python API call these modules.
"""
