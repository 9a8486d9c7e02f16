"""The settings of clients for a running llamasup (docs/connect.md)."""
