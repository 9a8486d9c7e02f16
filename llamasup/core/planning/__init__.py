"""Chooses the command line of llama-server, with a reason for each flag and an estimate of its memory.

It starts no process. Begin at ``plan.py``: the facts that a plan needs are read in ``facts.py``.
"""
