"""Serves the models of other llamasup nodes as if they were models of this node (docs/peers.md).

Begin with ``peers``, which owns the models; ``static`` is the source of nodes that a config names.
"""
