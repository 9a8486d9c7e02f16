"""What every llamasup does: it plans, starts, supervises and serves llama-servers.

The core imports nothing of ``features/``. docs/design.md draws its rooms. ``service/run.py`` puts
them together for one model: begin there.
"""
