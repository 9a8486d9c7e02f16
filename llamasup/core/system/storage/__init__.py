"""Private files and folders of this user, and a cache of facts that were read from files.

Begin with ``folders.py``.
"""
