"""Load, evict and update many models in the memory of one machine.

The pool decides which models have processes. Each process is supervised by ``supervision/``, and requests are
relayed by ``proxy/``. Begin with ``pool.py`` and ``model_steps.py``, the changes of one model.
"""
