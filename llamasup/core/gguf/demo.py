"""The demo model, to try an installation offline: it tells little stories of animals. 3 MB.

``scripts/demo/train.py`` has trained it and its draft; both files are part of the package.
"""

from __future__ import annotations

from importlib.resources import files


def demo_model() -> bytes:
    """Return the file of the demo model. Raises FileNotFoundError if the installation is incomplete."""
    return _trained("demo.gguf")


def demo_draft() -> bytes:
    """Return the file of a draft for the demo model, of a tenth of its size."""
    return _trained("demo-draft.gguf")


def _trained(name: str) -> bytes:
    return (files("llamasup.core.gguf") / "trained" / name).read_bytes()
