"""llamasup keeps llama.cpp's ``llama-server`` running."""

__version__ = "0.1.0"

__all__ = ["__version__"]
