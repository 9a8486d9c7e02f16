"""The configuration: YAML in, checked values out, with all errors at once. Begin at ``reading.py``."""
