"""The connections to llama-servers. Begin at ``connection.py``. Exchanges decide what a response means."""
