"""Serves Ollama's API on a listener of its own (docs/ollama.md): translates its requests into requests of
llama-server, and the answers back. Begin with ``dialect``, which has the paths.
"""
