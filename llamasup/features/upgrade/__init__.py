"""``llamasup upgrade``: a new build of llama.cpp proves itself while the running build serves.

Begin with ``upgrade``, which carries it out; ``verdict`` decides.
"""
