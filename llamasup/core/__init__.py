"""Plans, starts, supervises and serves llama-servers, as every llamasup does.

The core imports nothing of ``features/``. docs/design.md draws its rooms. ``service/hosting.py``
puts them together: begin there.
"""
