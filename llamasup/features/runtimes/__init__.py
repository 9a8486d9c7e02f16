"""Installs builds of llama.cpp, proves them and keeps them (``llamasup runtime``, docs/runtimes.md).

``assets`` chooses an archive of a release for a machine; ``install`` downloads, unpacks and publishes it.
Which build a start uses is in ``core/llama_server/installed.py``.
"""
