"""The messages of a chat, and what a typed line means (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

from llamasup.errors import UsageInvalid

COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "help": ("", "Show these commands."),
        "clear": ("", "Forget the conversation, and keep the system prompt."),
        "system": ("[TEXT]", "Set the system prompt. Without TEXT, remove it."),
        "image": ("PATH", "Attach an image to the next message."),
        "retry": ("", "Delete the last answer, and request another one."),
        "model": ("[NAME]", "Continue with another model. Without NAME, list the models."),
        "save": ("PATH", "Write the conversation to a new file, as the body of a request."),
        "exit": ("", "Leave the chat. Ctrl-D does the same."),
    }
)
"""The commands of a chat: their argument, and what they do."""

_SYNONYMS: Final = MappingProxyType({"?": "help", "bye": "exit", "quit": "exit", "reset": "clear"})


class Typed(Struct, frozen=True):
    """A line as typed. ``command`` is empty for a message; then ``text`` is the message."""

    command: str
    text: str


def typed(line: str) -> Typed:
    """Read a line. Raises UsageInvalid for an unknown command, and for a wrong number of arguments.

    A message may begin with a slash if a space or another slash follows within its first word, as in a path.
    """
    word, _, rest = line.strip().partition(" ")
    if not word.startswith("/") or word == "/" or "/" in word[1:]:
        return Typed("", line)
    name = word[1:].lower()
    name, rest = _SYNONYMS.get(name, name), rest.strip()
    if name not in COMMANDS:
        raise UsageInvalid(f"There is no command {word!r}.", remedy="/help lists the commands.")
    argument = COMMANDS[name][0]
    if rest and not argument:
        raise UsageInvalid(f"/{name} takes no argument, and {rest!r} was given.")
    if not rest and argument and not argument.startswith("["):
        raise UsageInvalid(f"/{name} needs an argument.", remedy=f"Write /{name} {argument}.")
    return Typed(name, rest)


class Conversation:
    """The messages of a chat with one model, and the images for the next message."""

    def __init__(self, model: str, system: str = "") -> None:
        self.model = model
        self.system = system
        self.images: list[Mapping[str, Any]] = []
        self._messages: list[Mapping[str, Any]] = []

    def add_message(self, text: str) -> None:
        """Add a message of the user, with the attached images. It replaces one without an answer."""
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()
        content: Any = text
        if self.images:
            content = [*self.images, {"type": "text", "text": text}]
        self._messages.append({"role": "user", "content": content})
        self.images = []

    def add_answer(self, text: str) -> None:
        """Add the answer to the last message. An answer without text is left out, as templates refuse it."""
        if text:
            self._messages.append({"role": "assistant", "content": text})

    def take_back(self) -> bool:
        """Delete the last answer, so that the last message is sent again. False if there is no message."""
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        return bool(self._messages)

    def clear(self) -> None:
        self._messages, self.images = [], []

    def body(self) -> Mapping[str, Any]:
        """The body of the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*system, *self._messages]}
