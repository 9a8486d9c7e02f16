"""``${NAME}`` in what is written: the environment's value, ``${NAME:-text}`` where it may have none."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["Unset", "expanded"]

_REFERENCE = re.compile(r"\$(\$(?=\{))|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|\$\{")


class Unset(Exception):
    """Something that cannot be replaced; the text says what, and what to do."""


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """``$${`` is a plain ``${``. What comes from the environment is not looked into again. Raises Unset."""

    def value(found: re.Match[str]) -> str:
        escape, name, default = found.groups()
        if escape:
            return "$"
        if name is None:
            raise Unset("'${' begins the name of a variable, as in ${HOME}; a plain one is written $${")
        known = environ.get(name)
        if default is not None:
            return known or default
        if known is None:
            raise Unset(
                f"the environment has no {name}; set it, or give a value for then: ${{{name}:-value}}"
            )
        return known

    return _REFERENCE.sub(value, text)
