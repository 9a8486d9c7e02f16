"""A runtime without a binary: llama-server's command line for the ``xllamacpp`` wheel.

``python -m llamasup.embedded`` accepts llama-server's flags and runs llama.cpp's HTTP server in this process.
llamasup starts, monitors and stops it exactly like a llama-server, and imports nothing from here.
"""

from __future__ import annotations
