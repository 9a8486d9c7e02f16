"""Translates the configuration of another program into a config of llamasup (``llamasup config import``).

Begin with ``command.py``. Each format has a pure module; ``draft.py`` writes the text.
"""
