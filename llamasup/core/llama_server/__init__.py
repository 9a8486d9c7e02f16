"""All knowledge of llama-server: how to find it, its flags, its log, its answers and its failures.

It does not decide what to start: that is ``core/planning`` and ``core/supervision``. Begin with
``inspect.py`` (which build is it, and what can it do) and ``argv_builder.py``.
"""
