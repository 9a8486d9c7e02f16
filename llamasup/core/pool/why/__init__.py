"""Explain the decisions of a pool in sentences, for ``llamasup why``.

It decides nothing. Begin with ``recording.py``, the sentences of a decision, and ``state_reasons.py``, the
sentences of a state.
"""
