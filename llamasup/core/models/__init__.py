"""The models that can be served: found files, their names and their settings. It loads no model.

Begin at ``registry.py``, which combines the rules of the config with the found files.
"""
