"""Chats with a model in the terminal, or answers one question in a pipe (``llamasup chat``)."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamasup.cli.command_group import argument, command_set, option
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import error_text, guarded
from llamasup.errors import LlamasupError, ModelMissing, NotRunning, UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.core.control.served_model import ServedModel
    from llamasup.features.chat.conversation import Conversation
    from llamasup.features.chat.stream import Client

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
    url: o.UsedUrl = None,
    pid: o.UsedPid = None,
    api_key_file: o.UsedKeyFile = None,
) -> int:
    """Chat with a model in the terminal or in a pipe.

    If no running llamasup serves the model, the command starts one for the time of the chat. /help lists the
    commands of the chat. Ctrl-C stops an answer, and Ctrl-D leaves the chat.
    """
    from llamasup.cli.interruptible import interruptible, on_ctrl_c
    from llamasup.core.auth.key_source import client_key
    from llamasup.features.chat.conversation import Conversation
    from llamasup.features.chat.images import read_image
    from llamasup.features.chat.stream import Client

    question = _question(prompt)
    images = [read_image(path) for path in image or ()]
    key = client_key(api_key_file, os.environ)

    async def talk() -> int:
        async with (
            _server(model, arguments or (), url=url, pid=pid, key=key) as served,
            Client(served.url, key) as client,
        ):
            conversation = Conversation(served.name, system)
            conversation.images = images
            if question is not None:
                conversation.add_message(question)
                return await _print_answer(conversation, client)
            from llamasup.features.chat.terminal import Chat

            names = (served.name, *served.others)
            chat = Chat(
                conversation,
                client,
                models=names,
                context=served.context,
                report=_report,
                on_ctrl_c=on_ctrl_c,
            )
            return await chat.run(served.url)

    return interruptible(talk())


def _report(error: LlamasupError) -> int:
    """Show an error before the next prompt: a view writes a little later. Returns the exit code."""
    from llamasup.features.chat.answer import safe

    text = error_text(f"llamasup: {error.message}", error.remedy, error.lines, error.details)
    sys.stderr.write(f"{safe(text)}\n")
    sys.stderr.flush()
    return error.exit_code


async def _print_answer(conversation: Conversation, client: Client) -> int:
    """Write the text of the next answer to standard output as it comes. Returns the exit code."""
    from llamasup.cli.output.results import write_bytes
    from llamasup.features.chat.answer import safe

    encoding, is_terminal = sys.stdout.encoding or "utf-8", sys.stdout.isatty()
    last = "\n"
    answer = client.answer(conversation)
    try:
        async for chunk in answer:
            text = "".join(choice.delta.content or "" for choice in chunk.choices)
            text = safe(text) if is_terminal else text
            if text and not write_bytes(text.encode(encoding, "backslashreplace")):
                return 0  # the reader has closed the pipe
            last = text or last
    finally:
        await answer.aclose()
        if not last.endswith("\n"):
            write_bytes(b"\n")
    return 0


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
    from llamasup.cli.started_server import started_server
    from llamasup.core.control.served_model import ModelNotServed, served_model

    is_given = url is not None or pid is not None
    if not arguments:
        try:
            found = _running(model, url, pid, key)
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
        yield served_model(started, None, key)


def _running(model: str | None, url: str | None, pid: int | None, key: str | None) -> ServedModel:
    """Return the model of a running llamasup: the named one, the only one, or the only loaded one."""
    from llamasup.cli.target import client_address
    from llamasup.core.control.served_model import served_model

    found, loaded = client_address(pid=pid, url=url)
    return served_model(found, model, key, loaded=loaded)


def _is_startable(model: str) -> bool:
    """Return whether ``llamasup run`` would find the model on this machine."""
    from llamasup.core.models.by_name import file_of
    from llamasup.core.planning.facts import DEMO
    from llamasup.core.system.storage.folders import expanded

    try:
        return model == DEMO or expanded(file_of(model)).exists()
    except (ModelMissing, OSError):  # the name is too long for a file
        return False
