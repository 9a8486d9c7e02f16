"""The index of a batch: its lines, and which of them are finished. A SQLite file next to the output.

The output is the truth: a line is finished when the output has it. The index follows, and ``Output`` tells it
what the output has beyond ``output_bytes``. Bodies are not copied: the index has their place in the input.

All methods block. One thread at a time may call them, with ``in_thread``.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, TypeVar

from msgspec import Struct

from llamasup.core.system.storage.database import (
    Database,
    is_full,
    open_database,
    require_private,
    version_of,
)
from llamasup.core.system.text import memory_text, printable
from llamasup.errors import DiskFull, LlamasupError, OutputFailed
from llamasup.features.batch.lines import (
    MAX_LINE_BYTES,
    PromptTemplate,
    RawLine,
    TemplateInvalid,
    prefix_key,
    raw_lines,
    read_line,
)

T = TypeVar("T")

VERSION: Final = 1
MAX_MISTAKES: Final = 20
"""Mistakes that are listed. Reading stops at a thousand."""
_STOP_AT: Final = 1000
_MISTAKE_CHARACTERS: Final = 200  # a field of a line may have megabytes
_HASH_BYTES: Final = 16
_PROGRESS_BYTES: Final = 1 << 18
_CACHE_KIB: Final = 4096  # of SQLite; so the memory does not grow with the number of lines

_CREATE = """
CREATE TABLE {table} (
    number INTEGER PRIMARY KEY,
    custom_id TEXT NOT NULL UNIQUE,
    offset INTEGER NOT NULL,
    size INTEGER NOT NULL,
    hash BLOB NOT NULL,
    url TEXT NOT NULL,
    model TEXT NOT NULL,
    prefix BLOB NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,
    tries INTEGER NOT NULL DEFAULT 0
)
"""
_INSERT = """
INSERT INTO fresh (number, custom_id, offset, size, hash, url, model, prefix) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_COLUMNS: Final = "number, custom_id, offset, size, hash, url, model, prefix, tries"


class LineState(IntEnum):
    """The state of a line. An ``ASIDE`` line may have ended its server, and runs at the end, alone."""

    WAITING = 0
    DONE = 1
    FAILED = 2
    ASIDE = 3


class BatchInvalid(LlamasupError):
    """The input has mistakes, and the run sends nothing. ``mistakes``: the first of them, by line."""

    exit_code = 65
    http_status = 400
    cause = "batch_invalid"
    mistakes: Sequence[tuple[int, str]] = ()


class InputChanged(BatchInvalid):
    """Finished lines have changed since they were run."""

    cause = "batch_changed"


class IndexedLine(Struct, frozen=True):
    number: int
    custom_id: str
    offset: int
    size: int
    hash: bytes
    url: str
    model: str
    prefix: bytes
    tries: int

    @property
    def place(self) -> tuple[bytes, int]:
        """The place of the line in the order of the lines of its model."""
        return self.prefix, self.number


class Counts(Struct, frozen=True):
    total: int = 0
    done: int = 0
    failed: int = 0
    aside: int = 0

    @property
    def finished(self) -> int:
        return self.done + self.failed

    @property
    def left(self) -> int:
        return self.total - self.finished


def fingerprint(line: bytes) -> bytes:
    """Return the hash of a line in the batch format; of a prompt, after its template was filled."""
    return blake2b(line, digest_size=_HASH_BYTES).digest()


class Index(Database):
    """Opens or creates the file; ``readonly``: it exists, and stays as it is. Use it as a context manager."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.path = path
        with self._mapped_errors():
            mode = "ro" if readonly else "rw"
            if not readonly:
                require_private(path)
            elif not path.with_name(f"{path.name}-wal").exists():
                mode += "&immutable=1"  # no process writes it: SQLite need not make files, on a full disk
            self._db = open_database(path, mode)
            try:
                self._settle(readonly=readonly)
            except BaseException:
                self._db.close()
                raise

    def _settle(self, *, readonly: bool) -> None:
        newer = partial(OutputFailed, remedy="Upgrade llamasup.")
        version = version_of(self._db, VERSION, f"The index {str(self.path)!r}", newer)
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._db.execute("PRAGMA temp_store = FILE")
        if readonly:
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        # A power cut may lose the last commits: the output has their lines.
        self._db.execute("PRAGMA synchronous = NORMAL")
        if version == 0:
            self._db.execute("BEGIN")
            self._db.execute(_CREATE.format(table="lines"))
            self._create_order()
            self._db.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value)")
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.execute("COMMIT")

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # --- facts

    def fact(self, name: str) -> str | int | None:
        rows = self._rows("SELECT value FROM facts WHERE name = ?", name)
        return rows[0][0] if rows else None

    def set_fact(self, name: str, value: str | int) -> None:
        with self._mapped_errors():
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    @property
    def output_bytes(self) -> int:
        """The size of the part of the output that the states of the lines include."""
        value = self.fact("output_bytes")
        return value if isinstance(value, int) else 0

    def counts(self) -> Counts:
        rows = self._rows("SELECT state, count(*) FROM lines GROUP BY state")
        by_state = {LineState(state): count for state, count in rows}
        return Counts(
            sum(by_state.values()),
            by_state.get(LineState.DONE, 0),
            by_state.get(LineState.FAILED, 0),
            by_state.get(LineState.ASIDE, 0),
        )

    def models(self) -> Sequence[tuple[str, int, int]]:
        """Return each model that a line names, with the number of its first line and the count of its
        lines.
        """
        return self._rows("SELECT model, min(number), count(*) FROM lines GROUP BY model ORDER BY 2")

    # --- reading the input

    def read_input(
        self,
        file: BinaryIO,
        *,
        template: PromptTemplate | None = None,
        most_lines: int | None = None,
        most_bytes: int = MAX_LINE_BYTES,
        only_url: str | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Take over the lines of the input; finished lines stay finished. All or nothing.

        ``only_url``: that of all lines. ``on_progress`` gets the bytes read, about once in 256 KiB, and may
        end the reading with an error. Raises BatchInvalid with the mistakes by line, and InputChanged if a
        finished line differs now.
        """
        mistakes: list[tuple[int, str]] = []
        count = reported = 0
        with self._transaction():
            self._db.execute("DROP TABLE IF EXISTS fresh")
            self._db.execute(_CREATE.format(table="fresh"))
            for raw in raw_lines(file, most_bytes):
                if on_progress is not None and raw.offset >= reported + _PROGRESS_BYTES:
                    reported = raw.offset
                    on_progress(reported)
                mistake = self._take(raw, template, most_bytes, only_url)
                if mistake is not None:
                    mistakes.append((raw.number, mistake))
                    if len(mistakes) >= _STOP_AT:
                        break
                count += 1
                if most_lines is not None and count > most_lines:
                    mistakes.append((raw.number, f"there are more than {most_lines} lines"))
                    break
            if mistakes:
                raise _invalid(mistakes)
            if not count:
                raise BatchInvalid("The input has no lines.", remedy="Write one request in each line.")
            self._check_changed()
            self._db.execute(
                "UPDATE fresh SET state = old.state, tries = old.tries FROM lines AS old"
                " WHERE old.custom_id = fresh.custom_id AND old.hash = fresh.hash"
            )
            self._db.execute("DROP TABLE lines")
            self._db.execute("ALTER TABLE fresh RENAME TO lines")
            self._create_order()

    def _take(
        self, raw: RawLine, template: PromptTemplate | None, most_bytes: int, only_url: str | None
    ) -> str | None:
        """Insert the line; returns what is wrong with it."""
        if raw.text is None:
            return f"it has {memory_text(raw.size)}; a line may have {memory_text(most_bytes)}"
        try:
            text = raw.text if template is None else template.fill(raw.text, raw.number)
        except TemplateInvalid as error:
            return str(error)
        line = read_line(text)
        if isinstance(line, str):
            return line
        if only_url not in (None, line.url):
            return f"url is {line.url!r}, and the endpoint of the batch {only_url!r}"
        row = (
            raw.number,
            line.custom_id,
            raw.offset,
            raw.size,
            fingerprint(text),
            line.url,
            line.model,
            prefix_key(line.body),
        )
        try:
            self._db.execute(_INSERT, row)
        except sqlite3.IntegrityError:
            (first,) = self._db.execute(
                "SELECT number FROM fresh WHERE custom_id = ?", (line.custom_id,)
            ).fetchone()
            return f"custom_id {line.custom_id!r} is also that of line {first}"
        except UnicodeEncodeError:  # half of a surrogate pair, as JSON can write it
            return "custom_id is not valid Unicode"
        return None

    def _check_changed(self) -> None:
        """Raises InputChanged if a finished line is gone, or has another text."""
        changed = self._db.execute(
            "SELECT old.custom_id, fresh.number FROM lines AS old"
            " LEFT JOIN fresh ON fresh.custom_id = old.custom_id"
            " WHERE old.state IN (1, 2) AND (fresh.number IS NULL OR fresh.hash != old.hash) LIMIT 21"
        ).fetchall()
        if changed:
            raise InputChanged(
                "The input has changed: the output has answers to lines that are different now.",
                remedy="Write to another output (-o), or restore the input.",
                details=tuple(
                    f"custom_id {custom_id!r}: "
                    + ("the line is gone" if number is None else f"line {number} has changed")
                    for custom_id, number in changed[:MAX_MISTAKES]
                ),
            )

    # --- the run

    def next_model(self, state: LineState, after: str | None) -> str | None:
        """Return the next model that has lines in this state."""
        beyond = "" if after is None else "AND model > ?"
        rows = self._rows(
            f"SELECT model FROM lines WHERE state = ? {beyond} ORDER BY model LIMIT 1",  # noqa: S608
            *(int(state), *(() if after is None else (after,))),
        )
        return str(rows[0][0]) if rows else None

    def lines_of(
        self, model: str, state: LineState, after: tuple[bytes, int] | None, limit: int
    ) -> list[IndexedLine]:
        """Return the next lines of a model in this state, in the order of the batch. ``after``: a
        ``place``.
        """
        beyond = "" if after is None else "AND (prefix, number) > (?, ?)"
        rows = self._rows(
            f"SELECT {_COLUMNS} FROM lines WHERE state = ? AND model = ? {beyond}"  # noqa: S608
            " ORDER BY prefix, number LIMIT ?",
            *(int(state), model, *(after or ()), limit),
        )
        return [IndexedLine(*row) for row in rows]

    def left(self) -> Iterator[IndexedLine]:
        """Return all unfinished lines, by number."""
        after = 0
        query = f"SELECT {_COLUMNS} FROM lines WHERE number > ? AND state IN (0, 3) ORDER BY number LIMIT 256"  # noqa: S608
        while rows := self._rows(query, after):
            yield from (IndexedLine(*row) for row in rows)
            after = rows[-1][0]

    def save(
        self,
        states: Mapping[int, LineState],
        tries: Mapping[int, int] = MappingProxyType({}),
        *,
        output_bytes: int | None = None,
    ) -> None:
        """Keep the states and the tries of lines, by number, and how much of the output they include."""
        with self._transaction():
            self._db.executemany("UPDATE lines SET state = ?2 WHERE number = ?1", states.items())
            self._db.executemany("UPDATE lines SET tries = ?2 WHERE number = ?1", tries.items())
            if output_bytes is not None:
                self.set_fact("output_bytes", output_bytes)

    # --- taking over what the output has

    def forget_output(self) -> None:
        """Forget which lines are finished: the output is gone, or shorter than before."""
        with self._transaction():
            self._db.execute("UPDATE lines SET state = 0 WHERE state IN (1, 2)")
            self.set_fact("output_bytes", 0)

    def take_over(self, lines: Iterator[tuple[str, bool, int]], path: Path) -> None:
        """Take over lines of the output beyond ``output_bytes``: id, whether it is an answer, and the end.

        Raises OutputFailed if one belongs to another batch, or is there twice.
        """
        with self._transaction():
            end = None
            for custom_id, is_answer, end in lines:  # noqa: B007 - the last end is used
                row = self._db.execute(
                    "SELECT number, state FROM lines WHERE custom_id = ?", (custom_id,)
                ).fetchone()
                if row is None or row[1] in (LineState.DONE, LineState.FAILED):
                    problem = ", which the input does not have" if row is None else " twice"
                    raise OutputFailed(
                        f"The output {str(path)!r} has the custom_id {printable(custom_id)!r}{problem}.",
                        remedy="Write to another output (-o).",
                    )
                state = LineState.DONE if is_answer else LineState.FAILED
                self._db.execute("UPDATE lines SET state = ? WHERE number = ?", (int(state), row[0]))
            if end is not None:
                self.set_fact("output_bytes", end)

    # --- private

    def _create_order(self) -> None:
        self._db.execute("DROP INDEX IF EXISTS ordered")
        self._db.execute("CREATE INDEX ordered ON lines (state, model, prefix, number)")

    def _failed(self, error: sqlite3.Error | OSError) -> LlamasupError:
        if is_full(error):
            return DiskFull(
                f"No space is left for the index {str(self.path)!r}.",
                remedy="Free some space, and run the same command again: it continues.",
            )
        reason: object = error
        remedy = "Make its folder writable. If it is damaged, remove it: the output has all answers."
        if isinstance(error, OSError):
            reason = error.strerror or error
            remedy = "Make its folder writable, or write to another output (-o)."
        return OutputFailed(f"The index {str(self.path)!r} cannot be used: {reason}.", remedy=remedy)


def _invalid(mistakes: Sequence[tuple[int, str]]) -> BatchInvalid:
    more = len(mistakes) - MAX_MISTAKES
    first = [
        (number, printable(mistake[:_MISTAKE_CHARACTERS])) for number, mistake in mistakes[:MAX_MISTAKES]
    ]
    shown = [f"line {number}: {mistake}" for number, mistake in first]
    if more > 0:
        least = "at least " if len(mistakes) >= _STOP_AT else ""
        shown.append(f"and {least}{more} more")
    count = "1 line" if len(mistakes) == 1 else f"{len(mistakes)} lines"
    error = BatchInvalid(
        f"The input has mistakes in {count}; this run has sent nothing.",
        remedy="Correct these lines.",
        details=tuple(shown),
    )
    error.mistakes = first
    return error


async def in_thread(function: Callable[[], T], executor: Executor | None = None) -> T:
    """Return the result of ``function``. A cancelled caller gets its CancelledError after the end of the
    thread.

    So ``function`` must take a bounded time.
    """
    calling = asyncio.get_running_loop().run_in_executor(executor, function)
    cancelled: asyncio.CancelledError | None = None
    while not calling.done():
        try:
            await asyncio.wait((calling,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        calling.exception()  # read, so that asyncio does not log it
        raise cancelled
    return calling.result()
