"""A runtime without a binary: llama-server's command line over the ``xllamacpp`` wheel.

``python -m llamasup.embedded`` reads llama-server's own flags and runs llama.cpp's own HTTP server inside
this process. The rest of llamasup starts it, reads it and stops it exactly as it does a llama-server.
Nothing here is imported by the rest of llamasup; importing the package itself costs nothing.
"""

from __future__ import annotations

__all__: list[str] = []
