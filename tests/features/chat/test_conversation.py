"""The messages of a chat, and what a typed line means."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from llamasup.errors import UsageInvalid
from llamasup.features.chat.conversation import COMMANDS, Conversation, Typed, typed
from llamasup.features.chat.images import MAX_IMAGE_BYTES, image_part, read_image

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ("Hello", Typed("", "Hello")),
        ("", Typed("", "")),
        ("/", Typed("", "/")),
        ("/usr/bin/env: what is it?", Typed("", "/usr/bin/env: what is it?")),
        ("// is a comment in C", Typed("", "// is a comment in C")),
        ("  two\nlines ", Typed("", "  two\nlines ")),
        ("/help", Typed("help", "")),
        (" /HELP ", Typed("help", "")),
        ("/?", Typed("help", "")),
        ("/bye", Typed("exit", "")),
        ("/reset", Typed("clear", "")),
        ("/system  You are a fox. ", Typed("system", "You are a fox.")),
        ("/system", Typed("system", "")),
        ("/image ~/a b.png", Typed("image", "~/a b.png")),
    ],
)
def test_line_is_a_message_or_a_command(line: str, means: Typed) -> None:
    assert typed(line) == means


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/halp", "There is no command '/halp'."),
        ("/help me", "/help takes no argument, and 'me' was given."),
        ("/image", "/image needs an argument."),
        ("/save ", "/save needs an argument."),
    ],
)
def test_wrong_command_says_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(UsageInvalid) as raised:
        typed(line)
    assert raised.value.message == message


def test_each_command_has_a_purpose_and_is_understood() -> None:
    for name, (argument, purpose) in COMMANDS.items():
        assert purpose.endswith(".")
        assert typed(f"/{name} x" if argument else f"/{name}").command == name


@pytest.mark.parametrize(
    ("first", "kind"),
    [(PNG, "png"), (b"\xff\xd8\xff\xe0", "jpeg"), (b"GIF89a", "gif"), (b"BM\0\0", "bmp")],
)
def test_image_becomes_a_part_with_its_type_and_content(first: bytes, kind: str) -> None:
    url = image_part(first, "a")["image_url"]["url"]
    head, _, content = url.partition(",")
    assert (head, base64.b64decode(content)) == (f"data:image/{kind};base64", first)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"RIFF\0\0\0\0WEBP", "'a.webp' is no image that llama-server reads."),
        (b"", "'a.webp' is no image that llama-server reads."),
        (PNG + b"\0" * MAX_IMAGE_BYTES, "The image 'a.webp' has more than 20 MiB."),
    ],
)
def test_other_files_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(UsageInvalid) as raised:
        image_part(content, "a.webp")
    assert raised.value.message == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("~nobody-of-this-name/a.png", "No such file or directory"),
        ("a\0b.png", "embedded null byte"),
    ],
)
def test_image_that_cannot_be_read_says_why(path: str, message: str) -> None:
    with pytest.raises(UsageInvalid, match=message):
        read_image(Path(path))


def roles(conversation: Conversation) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in conversation.body()["messages"]]


def test_conversation_alternates_whatever_happens() -> None:
    chat = Conversation("m", "Be short.")
    chat.add_message("one")
    chat.add_answer("")  # refused, or stopped before its first token
    chat.add_message("two")
    chat.add_answer("2")
    chat.add_message("three")
    assert chat.body()["model"] == "m"
    assert roles(chat) == [("system", "Be short."), ("user", "two"), ("assistant", "2"), ("user", "three")]
    assert chat.take_back()
    assert roles(chat)[-1] == ("user", "three")
    chat.add_answer("3")
    assert chat.take_back()
    assert roles(chat)[-1] == ("user", "three")
    chat.clear()
    assert roles(chat) == [("system", "Be short.")]
    assert not chat.take_back()


def test_images_belong_to_the_next_message_only() -> None:
    chat, image = Conversation("m"), image_part(PNG, "a")
    chat.images = [image]
    chat.add_message("What is it?")
    chat.add_answer("A cat.")
    chat.add_message("Sure?")
    content = [image, {"type": "text", "text": "What is it?"}]
    assert roles(chat) == [("user", content), ("assistant", "A cat."), ("user", "Sure?")]
