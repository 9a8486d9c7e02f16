"""Serves the console, a web page for operators: its files, its sessions and the access with their secrets.

Begin with ``routes``. The data that the page shows comes from the control API.
"""
