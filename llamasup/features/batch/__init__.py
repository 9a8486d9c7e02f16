"""Runs many requests from a file, survives crashes, and gives way to interactive clients (docs/batch.md)."""
