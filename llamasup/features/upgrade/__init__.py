"""``llamasup upgrade``: a new build of llama.cpp proves itself beside the running one before it serves.

Begin with ``upgrade``, which carries it out; ``verdict`` decides.
"""
