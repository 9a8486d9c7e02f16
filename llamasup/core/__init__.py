"""Plans, starts, supervises and serves llama-servers, as every llamasup does.

The core imports nothing of ``features/``. docs/design.md draws its rooms. ``service/run.py`` puts
them together for one model: begin there.
"""
