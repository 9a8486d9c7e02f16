"""Joins the tables of all options, for ``--help`` and the parser."""

from __future__ import annotations

from llamasup.embedded.option import Option
from llamasup.embedded.options_compute import COMPUTE
from llamasup.embedded.options_model import MODEL
from llamasup.embedded.options_sampling import SAMPLING
from llamasup.embedded.options_server import SERVER
from llamasup.embedded.options_speculative import SPECULATIVE

Section = tuple[str, tuple[Option, ...]]

_TABLE: tuple[Section, ...] = (
    ("common params", COMPUTE + MODEL),
    ("sampling params", SAMPLING),
    ("speculative params", SPECULATIVE),
    ("example-specific params", SERVER),
)


def supported(params: object) -> tuple[Section, ...]:
    """The table without the options that this ``CommonParams`` does not support."""
    return tuple(
        (title, tuple(option for option in options if option.is_possible(params)))
        for title, options in _TABLE
    )


def options_of(table: tuple[Section, ...]) -> tuple[Option, ...]:
    return tuple(option for _, options in table for option in options)


def help_text(table: tuple[Section, ...]) -> str:
    return "\n\n".join(
        f"----- {title} -----\n\n" + "".join(option.help() for option in options) for title, options in table
    )
