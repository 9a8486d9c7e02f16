"""Keep one llama-server running: its states, its process, its probes, and the events that it publishes.

It knows one process only: ``pool/`` knows the other models, and ``queueing/`` the requests. Begin with
``state_machine.py``, the table, and then ``runner.py``, which carries it out.
"""
