"""Resolves virtual models: names that change requests, or stand for one of several models
(docs/virtual-models.md). Begin with ``virtual_backend``; it loads no model itself.
"""
