"""Chats with a model in the terminal, or answers one question in a pipe (``llamasup chat``)."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamasup.cli.command_group import argument, command_set, option
from llamasup.cli.output.error_report import guarded
from llamasup.errors import ModelMissing, NotRunning, UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.cli.served_model import ServedModel

commands = command_set()

MAX_QUESTION_BYTES = 16 << 20

Model = Annotated[
    str | None,
    argument(
        "MODEL",
        "A model of the running llamasup, or any model that `llamasup run` takes. Default: the only one.",
    ),
]
RunOptions = Annotated[
    list[str] | None, argument("[-- OPTIONS]", "Options of `llamasup run`, if the chat starts llamasup.")
]
Question = Annotated[
    str | None, option("--prompt -p", "TEXT", "Answer this, and exit. Text on standard input is appended.")
]
System = Annotated[str, option("--system", "TEXT", "The system prompt.")]
Images = Annotated[
    list[Path] | None, option("--image", "PATH", "An image for the first message. Repeatable.")
]
Url = Annotated[str | None, option("--url", "URL", "URL of the llamasup to use. Env: $LLAMASUP_URL.")]
Pid = Annotated[int | None, option("--pid", "PID", "Process ID of the llamasup to use, if several run.")]
KeyFile = Annotated[
    Path | None, option("--api-key-file", "PATH", "File with the API key. Env: $LLAMASUP_API_KEY.")
]


@commands.command()
@guarded
def chat(
    view: View,
    model: Model = None,
    arguments: RunOptions = None,
    *,
    prompt: Question = None,
    system: System = "",
    image: Images = None,
    url: Url = None,
    pid: Pid = None,
    api_key_file: KeyFile = None,
) -> int:
    """Chat with a model in the terminal, or answer one question in a pipe.

    If no running llamasup serves the model, the command starts one for the time of the chat. /help lists the
    commands of the chat. Ctrl-C stops an answer, and Ctrl-D leaves the chat.
    """
    from llamasup.cli.interruptible import interruptible
    from llamasup.core.auth.key_source import client_key
    from llamasup.features.chat.conversation import Conversation, image_part

    question = _question(prompt)
    images = [image_part(read_image(path), path.name) for path in image or ()]
    key = client_key(api_key_file, os.environ)

    async def talk() -> int:
        async with _server(model, arguments or (), url=url, pid=pid, key=key) as served:
            conversation = Conversation(served.name, system)
            conversation.images = list(images)
            if question is None:
                from llamasup.features.chat.terminal import chat_in_terminal

                return await chat_in_terminal(served, key, conversation, view)
            from llamasup.features.chat.stream import Client

            conversation.add_message(question)
            async with Client(served.url, key) as client:
                return await client.print_answer(conversation)

    return interruptible(talk())


def read_image(path: Path) -> bytes:
    """Read an image file. Raises UsageInvalid."""
    from llamasup.core.system.storage.folders import read_bounded
    from llamasup.features.chat.conversation import MAX_IMAGE_BYTES

    try:
        return read_bounded(path.expanduser(), MAX_IMAGE_BYTES + 1)[0]
    except OSError as error:
        raise UsageInvalid(f"The image {str(path)!r} cannot be read: {error.strerror or error}.") from None


def _question(prompt: str | None) -> str | None:
    """Return the only question of this run; None for a chat in the terminal."""
    if sys.stdin.isatty():
        if prompt is None and not sys.stdout.isatty():
            raise UsageInvalid(
                "Standard output is no terminal, and there is no question.",
                remedy="Give one with --prompt, or on standard input.",
            )
        return prompt
    piped = sys.stdin.buffer.read(MAX_QUESTION_BYTES + 1)
    if len(piped) > MAX_QUESTION_BYTES:
        raise UsageInvalid(f"Standard input has more than {MAX_QUESTION_BYTES >> 20} MiB.")
    try:
        text = piped.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UsageInvalid(
            "Standard input is not UTF-8 text.", remedy="For an image, use --image PATH."
        ) from None
    question = "\n\n".join(part for part in (prompt, text) if part)
    if not question:
        raise UsageInvalid("The question is empty.", remedy="Give one with --prompt, or on standard input.")
    return question


@asynccontextmanager
async def _server(
    model: str | None, arguments: Sequence[str], *, url: str | None, pid: int | None, key: str | None
) -> AsyncIterator[ServedModel]:
    """Yield the model of a running llamasup, or of a new one that runs until the block ends."""
    from llamasup.cli.served_model import ModelNotServed, served_model
    from llamasup.cli.started_server import started_server

    is_given = url is not None or pid is not None
    if not arguments:
        try:
            found = served_model(model, url=url, pid=pid, key=key)
        except NotRunning as error:
            if is_given or model is None:
                if not is_given:
                    error.remedy = "Name a model, and this command starts llamasup: `llamasup chat MODEL`."
                raise
        except ModelNotServed:
            if is_given or model is None or not _is_startable(model):
                raise
        else:
            yield found
            return
    if model is None:
        raise UsageInvalid("Options after -- need a model.", remedy="Write `llamasup chat MODEL -- OPTIONS`.")
    if is_given:
        raise UsageInvalid(
            "Options after -- start a llamasup, and --pid and --url name one.",
            remedy="Leave out one of them.",
        )
    # One slot has the whole context. Its keys come from the environment.
    async with started_server(model, ("--parallel", "1", *arguments)) as started:
        yield served_model(None, url=started, pid=None, key=key)


def _is_startable(model: str) -> bool:
    """Return whether ``llamasup run`` would find the model on this machine."""
    from llamasup.core.models.by_name import file_of
    from llamasup.core.planning.facts import DEMO

    try:
        return model == DEMO or Path(file_of(model)).expanduser().exists()
    except ModelMissing:
        return False
