"""Plans, starts, supervises and serves llama-servers, as every llamasup does.

The core imports nothing of ``features/``. docs/design.md lists its rooms. Begin with ``service/hosting.py``,
which puts them together.
"""
