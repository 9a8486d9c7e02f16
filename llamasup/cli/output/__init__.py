"""Formats what commands print, and writes it: results to standard output, messages to standard error.

Enter at ``view`` (lines) and ``results``.
"""
