"""Writes the settings of client programs for a running llamasup (docs/connect.md).

``clients`` is the table of clients; ``merge`` changes a settings file and keeps what the user wrote.
"""
