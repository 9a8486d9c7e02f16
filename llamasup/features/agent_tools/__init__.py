"""Makes the tools of agents known to llama-server, which reads only function tools: in ``/v1/responses``,
namespaces and custom tools become functions, and their calls are named back. Begin with ``tools.py``.
"""
