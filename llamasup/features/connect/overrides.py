"""The settings of a client for one process: its arguments, its variables, and a file (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from msgspec import Struct

from llamasup.features.connect.clients import Client, Settings
from llamasup.features.connect.merge import merged


class Overrides(Struct, frozen=True):
    """The settings of one process. ``file_content``: the content of the file that they name, or None.

    No argument has a key: the list of processes shows arguments to other users.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    file_content: str | None = None


def overrides(
    client: Client, settings: Settings, given: Sequence[str], file: PurePath, own: str
) -> Overrides:
    """Return the settings for a process with the arguments ``given``, whose settings file is ``file``.

    ``own`` is the text of the user's settings file. It is merged where the client would not read it. Raises
    CannotMerge.
    """
    arguments, environment = ((), settings.environment) if client.inline is None else client.inline(settings)
    content = None
    if client.file_variable:
        environment = {**environment, client.file_variable: str(file)}
        content = merged(own, settings.values, client.format)
    elif client.file_option and not any(
        word == client.file_option or word.startswith(f"{client.file_option}=") for word in given
    ):
        arguments = (client.file_option, str(file), *arguments)
        content = merged("" if client.inline else own, settings.values, client.format)
    return Overrides((*arguments, *given), environment, content)
