"""Listens for clients: plain, with TLS, on Unix sockets. ``access_policy.py`` decides who may call."""
