"""The configuration: YAML in, checked values out. What is wrong is said all at once."""

from llamasup.config.reading import load
from llamasup.config.values import Config

__all__ = ["Config", "load"]
