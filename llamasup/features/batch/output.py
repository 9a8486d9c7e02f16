"""The output of a batch: one line for each line of the input, appended in blocks and never changed.

A block is on the disk before the index says so. After a crash, ``settle`` removes a torn last line, and tells
the index which lines the output has. All functions block.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import DiskFull, OutputFailed
from llamasup.features.batch.index import Index, LineState

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CHUNK: Final = 1 << 20
BLOCK_LINES: Final = 500
BLOCK_BYTES: Final = 4 << 20
BLOCK_S: Final = 0.5
"""A crash of llamasup repeats the lines of at most one block."""
_BEGIN: Final = b'{"id":"batch_req_'  # of each line


class _Response(Struct):
    status_code: int = 0


class _Written(Struct):
    """The fields of a line of the output that decide its state."""

    custom_id: str
    response: _Response | None = None
    error: dict[str, Any] | None = None

    @property
    def is_answer(self) -> bool:
        status = 0 if self.response is None else self.response.status_code
        return 200 <= status < 300 and self.error is None


_decode = msgspec.json.Decoder(_Written).decode


def answer_line(
    id_: str, custom_id: str, status: int, request_id: str, body: bytes, error: tuple[str, str] | None = None
) -> bytes:
    """Write a line in OpenAI's format, for an answer with any status. ``body``: JSON, or text. ``error``:
    code and message, if the answer is not what the line requires.
    """
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
        answer = msgspec.Raw(
            body.replace(b"\n", b" ").replace(b"\r", b" ")
        )  # JSON has them between values only
    except INVALID_JSON:
        answer = msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
    return (
        msgspec.json.encode(
            {
                "id": id_,
                "custom_id": custom_id,
                "response": {"status_code": status, "request_id": request_id, "body": answer},
                "error": None if error is None else {"code": error[0], "message": error[1]},
            }
        )
        + b"\n"
    )


def error_line(id_: str, custom_id: str, code: str, message: str) -> bytes:
    """Write the line of a request that got no answer."""
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": id_, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def is_answer(line: bytes) -> bool:
    """Whether a line of an output is an answer, and no error."""
    return _decode(line).is_answer


def _read(line: bytes) -> _Written | None:
    """Read a line. None if another program has written it, or if a crash has torn it."""
    if not line.startswith(_BEGIN):
        return None
    try:
        return _decode(line)
    except INVALID_JSON:
        return None


class Output:
    """Appends to ``path``, after ``settle`` was called. Raises OutputFailed and DiskFull."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            raise self._failed(error) from None
        self.end = 0

    def close(self) -> None:
        os.close(self._fd)

    def settle(self, index: Index) -> None:
        """Remove a torn last line, and let the index take over the lines that it does not know.

        A file that another program has written is refused, and stays as it is.
        """
        try:
            status = os.fstat(self._fd)
            size, name = status.st_size, f"{status.st_dev}/{status.st_ino}"
            is_known = index.fact("output") == name
            if index.output_bytes and not (is_known and size >= index.output_bytes):
                index.forget_output()
            self.end = index.output_bytes
            index.take_over(self._complete_lines(size, is_known=is_known), self.path)
            index.set_fact("output", name)
            if self.end < size:
                os.ftruncate(self._fd, self.end)
                os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from None

    def append(self, lines: Sequence[bytes]) -> int:
        """Write a block, and wait until it is on the disk. Returns the new end.

        If that fails, nothing of the block stays.
        """
        block = memoryview(b"".join(lines))
        end = self.end
        try:
            while block:
                os.lseek(self._fd, end, os.SEEK_SET)  # nothing else uses this position
                written = os.write(self._fd, block)
                block = block[written:]
                end += written
            os.fsync(self._fd)
        except OSError as error:
            # The next start also removes a torn line, but no reader should see one until then.
            os.ftruncate(self._fd, self.end)
            raise self._failed(error) from None
        self.end = end
        return end

    def _complete_lines(self, size: int, *, is_known: bool) -> Iterator[tuple[str, bool, int]]:
        """The lines from ``end`` on, up to the first that is torn; moves ``end``.

        ``is_known``: a run with this index has opened this file.
        """
        rest = b""
        at = self.end
        while at < size and (piece := native.read_at(self._fd, _CHUNK, at)):
            at += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                written = _read(line)
                if written is None:
                    torn = line + b"\n" + rest
                    if at < size or line is not lines[-1] or not self._is_torn(torn, is_known=is_known):
                        raise self._of_others()
                    return
                self.end += len(line) + 1
                yield written.custom_id, written.is_answer, self.end
            if len(rest) > _CHUNK and not rest.startswith((_BEGIN, b"\0")):
                break  # do not read all of it
        if rest and not self._is_torn(rest, is_known=is_known):
            raise self._of_others()

    def _is_torn(self, text: bytes, *, is_known: bool) -> bool:
        """Whether a crash can have left this end of a block. That of the machine may leave zeros."""
        if text.startswith(_BEGIN):
            return b"\n" not in text or b"\0" in text
        is_ours = is_known or self.end > 0
        return is_ours and (_BEGIN.startswith(text) or not text.strip(b"\0\n"))

    def _of_others(self) -> OutputFailed:
        return OutputFailed(
            f"The output {str(self.path)!r} has an invalid line at byte {self.end}."
            " Nothing in it was changed.",
            remedy="Another program has written it. Write to another output (-o).",
        )

    def _failed(self, error: OSError) -> OutputFailed | DiskFull:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            return DiskFull(
                f"The output {str(self.path)!r} cannot grow: {reason}. All finished lines are in it.",
                remedy="Free some space, and run the same command again: it continues.",
            )
        return OutputFailed(
            f"The output {str(self.path)!r} cannot be written: {reason}.",
            remedy="Make it writable, or choose another output (-o).",
        )


class Block:
    """The results of a run that are not saved yet: finished lines, and the states and the tries of lines."""

    def __init__(self, output: Output, index: Index) -> None:
        self._output = output
        self._index = index
        self._clear()

    def _clear(self) -> None:
        self._lines: list[bytes] = []
        self._states: dict[int, LineState] = {}
        self.tries: dict[int, int] = {}
        self._bytes = 0
        self.due_s = inf

    def add(self, line: bytes, now_s: float) -> None:
        """Add a line of the output. ``due_s`` tells when to save the block."""
        self._lines.append(line)
        self._bytes += len(line)
        self.due_s = min(self.due_s, now_s + BLOCK_S)
        if len(self._lines) >= BLOCK_LINES or self._bytes >= BLOCK_BYTES:
            self.due_s = now_s

    def set_state(self, number: int, state: LineState) -> None:
        self._states[number] = state

    def save(self) -> None:
        """Write the lines, then the index. Else the lines run again. Raises as ``Output.append``."""
        lines, states, tries = self._lines, self._states, self.tries
        self._clear()
        if lines or states or tries:
            end = self._output.append(lines) if lines else None
            self._index.save(states, tries, output_bytes=end)


def divide(output: Output, index: Index, paths: Sequence[Path], code: str) -> tuple[int, int]:
    """Write the answers to one file and the errors to another; unfinished lines get an error with this code.

    Returns the sizes. Blocks. Raises DiskFull.
    """
    try:
        return _divided(output, index, paths, code)
    except OSError as error:
        for path in paths:
            path.unlink(missing_ok=True)
        raise DiskFull(
            f"The files of the results cannot be written: {error.strerror}.",
            remedy="Free some space. Then the batch finishes.",
        ) from None


def _divided(output: Output, index: Index, paths: Sequence[Path], code: str) -> tuple[int, int]:
    with paths[0].open("wb") as answers, paths[1].open("wb") as failures:
        with output.path.open("rb") as lines:
            for line in lines:
                (answers if is_answer(line) else failures).write(line)
        for left in index.left():
            failures.write(
                error_line(f"batch_req_{left.number}", left.custom_id, code, "this line was not run")
            )
        for file in (answers, failures):
            file.flush()
            os.fsync(file.fileno())
        sizes = answers.tell(), failures.tell()
    for path, size in zip(paths, sizes, strict=True):
        if not size:
            path.unlink()
    return sizes
