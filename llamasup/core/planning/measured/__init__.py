"""Measurements of earlier loads and the results of ``llamasup tune``, which later plans use."""
