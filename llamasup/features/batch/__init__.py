"""Runs many requests from a file, survives crashes, and yields to interactive clients (docs/batch.md).

Begin with ``engine``, which owns one run; ``job`` is a batch of files on this machine, ``api`` the HTTP API.
"""
