"""Models in a hub or at a URL: references to them, the files to choose, and files in the models folder.

Downloads themselves are ``features/downloads``. Begin with ``reference.py``.
"""
