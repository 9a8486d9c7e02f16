"""Writes the systemd units of llamasup, and reports the state of a service to systemd.

Begin with ``unit_file`` for the units, and with ``reporter`` for a running service.
"""
