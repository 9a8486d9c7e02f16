"""Serve the control API of a running llamasup (docs/control.md), and call it from commands.

Whether a client may call the API is decided elsewhere: by the permissions of the private socket, or by
``proxy/``. Begin with ``routes.py``, or with ``client.py`` for the side of the commands.
"""
