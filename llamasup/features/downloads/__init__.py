"""Downloads models from a model hub or a URL; the store of what is downloaded is in ``core/hub``.

Begin with ``pull``, which downloads one model; ``manager`` does so for a service, in a process of its own.
"""
