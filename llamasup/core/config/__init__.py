"""The configuration: YAML in, checked values out. What is wrong is said all at once."""

from llamasup.core.config.config_keys import Config
from llamasup.core.config.reading import load

__all__ = ["Config", "load"]
