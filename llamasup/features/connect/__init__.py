"""Writes the settings of client programs, and runs one with a model (docs/connect.md).

``clients`` is the table of clients; ``merge`` changes a settings file and keeps what the user wrote;
``overrides`` are the settings of one process; ``check`` is one request of a client.
"""
