"""Declares the options that several commands share, and parses their values. Enter at ``shared``."""
