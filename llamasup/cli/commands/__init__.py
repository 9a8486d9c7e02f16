"""Has a module for each command, or for a few that belong together: it declares the options, calls the rooms
below, and prints. Enter at ``COMMANDS`` in ``cli/app.py``.
"""
