"""The chat in the terminal: reads lines with prompt_toolkit, and writes answers as they come."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings
from rich.console import Console
from rich.table import Table

from llamasup.core.system.storage.folders import expanded
from llamasup.core.system.text import json_text, printable
from llamasup.errors import LlamasupError, NotRunning, OutputFailed, UsageInvalid
from llamasup.features.chat.answer import Cost, safe
from llamasup.features.chat.conversation import COMMANDS, Conversation, Typed, typed
from llamasup.features.chat.images import read_image
from llamasup.features.chat.stream import Client

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent


_PROMPT: Final = ">>> "
_NEXT_LINE: Final = "... "


class Chat:
    """A chat in the terminal of this process.

    ``models`` are the names that /model takes; the first one has ``context`` tokens for a request, if that is
    known. ``report`` shows an error, and returns its exit code. In the block of ``on_ctrl_c(act)``, Ctrl-C
    calls ``act``.
    """

    def __init__(
        self,
        conversation: Conversation,
        client: Client,
        *,
        models: Sequence[str],
        context: int | None,
        report: Callable[[LlamasupError], int],
        on_ctrl_c: Callable[[Callable[[], None]], AbstractContextManager[None]],
    ) -> None:
        self._conversation = conversation
        self._client = client
        self._models = models
        self._context = context
        self._report = report
        self._on_ctrl_c = on_ctrl_c
        self._out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._commands: Mapping[str, Callable[[str], bool]] = {
            "help": self._help,
            "clear": self._clear,
            "system": self._system,
            "image": self._image,
            "retry": self._retry,
            "model": self._model,
            "save": self._save,
        }

    async def run(self, url: str) -> int:
        """Chat until the user leaves. Returns the exit code."""
        if isinstance(sys.stdout, TextIOWrapper):  # an answer may have letters that the terminal has not
            sys.stdout.reconfigure(errors="backslashreplace")
        self._note(f"{self._conversation.model} at {url} · /help lists commands, Ctrl-D leaves")
        # Between two answers, Ctrl-C is a key that empties the line, or comes too late for an answer.
        with self._on_ctrl_c(lambda: None):
            return await self._talk()

    async def _talk(self) -> int:
        # The lines stay in memory: what users write is not kept (docs/security.md).
        session: PromptSession[str] = PromptSession(
            key_bindings=_keys(), completer=_Words(self._models), prompt_continuation=_NEXT_LINE
        )
        while True:
            try:
                line = await session.prompt_async(_PROMPT, handle_sigint=False)
            except KeyboardInterrupt:
                continue  # Ctrl-C empties the line
            except EOFError:
                return 0
            try:
                entered = typed(line)
                if entered.command == "exit":
                    return 0
                if self._is_question(entered):
                    await self._answer()
            except NotRunning as error:
                return self._report(error)
            except LlamasupError as error:
                self._report(error)

    def _is_question(self, entered: Typed) -> bool:
        """Carry out a command, or add a message. Returns whether an answer is due."""
        if entered.command:
            return self._commands[entered.command](entered.text)
        if not entered.text.strip():
            return False
        self._conversation.add_message(entered.text)
        return True

    async def _answer(self) -> None:
        """Show the next answer. Ctrl-C ends only the answer, and keeps the text that has come."""
        text: list[str] = []
        try:
            async with asyncio.timeout(None) as limit:
                with self._on_ctrl_c(partial(_expire, limit)):
                    await self._show_answer(text)
        except TimeoutError:
            self._note("(stopped)")
        finally:
            self._conversation.add_answer("".join(text))

    async def _show_answer(self, text: list[str]) -> None:
        cost, is_thinking, written = Cost(), False, "\n"
        answer = self._client.answer(self._conversation)
        try:
            async for chunk in answer:
                cost.add(chunk)
                for choice in chunk.choices:
                    thought, said = choice.delta.reasoning_content, choice.delta.content
                    if thought:
                        is_thinking = True
                        self._write(thought, style="dim")
                    if said:
                        if is_thinking:
                            self._write("\n\n")
                            is_thinking = False
                        text.append(said)
                        self._write(said)
                    written = said or thought or written
        finally:
            await answer.aclose()
            if not written.endswith("\n"):
                self._write("\n")
        is_first = self._conversation.model == self._models[0]
        self._note(cost.text(self._context if is_first else None))

    def _help(self, _: str) -> bool:
        table = Table.grid(padding=(0, 2))
        for name, (argument, purpose) in COMMANDS.items():
            table.add_row(f"/{name} {argument}", purpose)
        table.add_row("Esc Enter", "Begin another line in the message.")
        self._out.print(table)
        return False

    def _clear(self, _: str) -> bool:
        self._conversation.clear()
        self._note("The conversation is empty.")
        return False

    def _system(self, text: str) -> bool:
        self._conversation.system = text
        self._note("The system prompt applies to the next answer." if text else "There is no system prompt.")
        return False

    def _image(self, path: str) -> bool:
        name = Path(path).name
        self._conversation.images.append(read_image(Path(path.strip("'\""))))
        self._note(f"{printable(name)} is attached to the next message.")
        return False

    def _retry(self, _: str) -> bool:
        if not self._conversation.take_back():
            raise UsageInvalid("There is no message to answer again.")
        return True

    def _model(self, name: str) -> bool:
        if name and name not in self._models:
            raise UsageInvalid(
                f"The model {name!r} is not served.", remedy=f"Choose one of {', '.join(self._models)}."
            )
        if name:
            self._conversation.model = name
        for model in [name] if name else self._models:
            self._note(f"{'*' if model == self._conversation.model else ' '} {printable(model)}")
        return False

    def _save(self, path: str) -> bool:
        target = expanded(path)
        content = json_text(self._conversation.body(), indent=2).encode() + b"\n"
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except OSError as error:
            raise OutputFailed(f"{path!r} cannot be written: {error.strerror or error}.") from None
        self._note(f"Wrote {printable(path)}")
        return False

    # --- the terminal

    def _write(self, text: str, style: str | None = None) -> None:
        self._out.print(safe(text), end="", style=style)
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        if text:
            self._out.print(safe(text), style="dim")


def _expire(limit: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # it has just ended, or has expired already
        limit.reschedule(0)


class _Words(Completer):
    """Completes commands, and the names and paths that they take."""

    def __init__(self, models: Sequence[str]) -> None:
        self._models = models
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/"):
            return
        name, space, rest = line[1:].partition(" ")
        if space and "PATH" in COMMANDS.get(name, ("",))[0]:
            yield from self._paths.get_completions(Document(rest), complete_event)
            return
        words, typed_so_far = (
            (COMMANDS, name) if not space else (self._models if name == "model" else (), rest)
        )
        yield from (Completion(word, -len(typed_so_far)) for word in words if word.startswith(typed_so_far))


def _keys() -> KeyBindings:
    """Enter sends the message. Esc Enter, which Alt-Enter sends, begins another line."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
