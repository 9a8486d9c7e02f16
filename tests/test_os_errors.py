"""The numbers of the operating system's errors are in no message: users search for the words."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.http.address import UnixAddress
from llamasup.core.llama_server.answers import NoAnswer
from llamasup.core.llama_server.client import Prober
from llamasup.core.llama_server.warmup import no_response, warm_up_request
from llamasup.embedded.option import InvalidValue, file_text
from llamasup.errors import LlamasupError, without_errno
from llamasup.features.downloads.retries import TransientError, translated_errors
from llamasup.features.peers.watch import _unconnected
from llamasup.features.usage.saver import _unexpected

RESET = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
FULL = OSError(errno.ENOSPC, "No space left on device", "/usage.db")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        # huggingface/huggingface_hub#2822, Paper2Poster/Paper2Poster#12
        (httpx.ReadError(str(RESET)), "Connection reset by peer"),
        # pytorch/pytorch#14701
        (
            httpx.ConnectError("no name: [Errno -3] Temporary failure in name resolution"),
            "no name: Temporary failure in name resolution",
        ),
        # thewh1teagle/vibe#1155, on Windows
        (
            httpx.ConnectError("[WinError 10054] An existing connection was closed"),
            "An existing connection was closed",
        ),
        (httpx.ReadError(""), "the connection was cut"),
    ],
)
def test_the_line_of_a_retry_has_the_words_of_the_error(error: httpx.TransportError, shown: str) -> None:
    with pytest.raises(TransientError) as raised, translated_errors("https://hub/x"):
        raise error
    assert str(raised.value) == f"https://hub/x: {shown}"


def _refused_socket() -> str:
    async def ask() -> str:
        async with Prober(UnixAddress("/nonexistent/s.sock"), None) as prober:
            try:
                await prober.send(warm_up_request(ModelClass.DECODER))
            except NoAnswer as error:
                return no_response(warm_up_request(ModelClass.DECODER), error)
        raise AssertionError

    return asyncio.run(ask())


def _unread_grammar() -> str:
    with pytest.raises(InvalidValue) as raised:
        file_text("/nonexistent/grammar.gbnf")
    return str(raised.value)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (lambda: str(LlamasupError(f"The file cannot be written: {FULL}.")), "No space left on device"),
        (lambda: LlamasupError(f"x: {RESET}").message, "Connection reset by peer"),
        (lambda: _unconnected(httpx.ConnectError("[Errno 113] No route to host")).reason, "No route to host"),
        (lambda: _unexpected(FULL), "OSError: No space left on device"),
        (_refused_socket, "was not answered: "),
        (_unread_grammar, "(No such file or directory)"),
    ],
)
def test_no_message_has_the_number_of_an_error(message: Callable[[], str], shown: str) -> None:
    text = message()
    assert shown in text
    assert "Errno" not in text


@pytest.mark.parametrize("text", ["[Errno]", "Errno 5", "[errno 5] x", "error", ""])
def test_other_text_stays(text: str) -> None:
    assert without_errno(text) == text


def test_the_embedded_program_names_a_missing_file_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue) as raised:
        (tmp_path / "binary").write_bytes(b"\xff")
        file_text(str(tmp_path / "binary"))
    assert str(raised.value).endswith("(it is not UTF-8)")
