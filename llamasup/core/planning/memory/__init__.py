"""The memory of a model: estimates for its parts, and the shares of several models.

Begin at ``estimate.py``. It measures nothing.
"""
