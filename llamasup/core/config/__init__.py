"""The configuration: YAML in, checked values out, with all errors at once. Begin at ``reading.py``.

The settings themselves are declared in ``settings/``.
"""

from llamasup.core.config.config_keys import Config
from llamasup.core.config.reading import load

__all__ = ["Config", "load"]
