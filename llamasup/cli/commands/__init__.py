"""The commands: one module for each, or for a few that belong together.

A module declares options, calls the rooms below, and prints. Enter at ``COMMANDS`` in ``cli/app.py``.
"""
