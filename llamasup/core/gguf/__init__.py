"""Reads GGUF files, and tells what the model in a file is.

It knows the format and the architectures, but not the memory that a plan takes. Begin with
``files.read_model`` and ``facts.ModelFacts``.
"""
