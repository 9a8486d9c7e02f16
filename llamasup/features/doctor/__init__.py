"""``llamasup doctor`` and ``llamasup inspect``: collect facts about the machine, the runtime and a model,
and judge them. They change nothing. Begin with ``command``; ``inspection`` describes one model file.
"""
