"""Serves llama.cpp's router API under ``serve``: ``/models/load``, ``/models/unload`` and ``/models/sse``
(docs/router.md). Begin with ``routes``. The proxy decides who may use these paths, and answers ``/models``,
``/props`` and ``autoload`` itself.
"""
