from __future__ import annotations

import json
import os
import re
import termios
import threading
from collections.abc import Iterator
from io import TextIOWrapper

import pytest

from llamasup.cli.output.nonblocking_writer import MAX_BYTES, MAX_LINES, OutputWriter
from llamasup.cli.output.view import JsonView, TextView, duration_text, while_waiting
from llamasup.core.system.text import display_width, memory_text


class Pipe:
    """Both ends of a pipe, and the writer to it."""

    def __init__(self) -> None:
        read_end, write_end = os.pipe()
        self.reader: TextIOWrapper = os.fdopen(read_end)
        self.stream: TextIOWrapper = os.fdopen(write_end, "w")
        self.writer = OutputWriter(self.stream)

    def everything(self) -> str:
        self.writer.close(timeout_s=60)
        self.stream.close()
        return self.reader.read()

    def close(self) -> None:
        """The writer's thread ends before its descriptor is closed: the next pipe may get the same number."""
        self.reader.close()
        self.writer.close(timeout_s=60)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    yield (made := Pipe())
    made.close()


def test_live_line_is_shown_on_terminals_only(pipe: Pipe) -> None:
    view = TextView(pipe.writer)
    view.show_activity("loading tiny")
    view.tick()
    assert not view.is_busy
    view.say("info", "ready", "two\nlines")
    assert pipe.everything() == "two\nlines\n"


def test_control_characters_of_file_names_are_escaped(pipe: Pipe) -> None:
    pipe.writer.is_terminal = True
    view = TextView(pipe.writer)
    view.say("info", "found", "\x1b[31mred.gguf\nis here")
    view.show_activity("loading \x1b[2Jgone.gguf")
    seen = pipe.everything()
    assert seen.startswith("\\x1b[31mred.gguf\nis here\n")
    assert "loading \\x1b[2Jgone.gguf" in seen


@pytest.mark.parametrize("columns", [40, 80])
def test_live_line_is_shortened_in_its_middle(columns: int) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    stream = os.fdopen(theirs, "w")
    writer = OutputWriter(stream)
    view = TextView(writer)
    view.show_activity(
        "downloading org/A-Model-With-A-Very-Long-Name-Instruct-GGUF:Q4_K_M 模型模型 · 12 of 80 GiB"
    )
    view.tick()
    writer.close()
    text = ""
    while len(re.findall(r"GiB · [\d.]+ m?s", text)) < 2:  # the terminal may deliver it in pieces
        text += os.read(ours, 4096).decode()
    stream.close()
    shown = text.split("\r\x1b[2K")[1:]
    os.close(ours)
    assert len(shown) == 2
    for line in shown:
        assert columns - 3 < display_width(line) < columns
        assert "…" in line
        assert " 80 GiB · " in line


def test_line_below_the_level_is_not_written(pipe: Pipe) -> None:
    TextView(pipe.writer, level="warning").say("info", "ready", "ready")
    JsonView(pipe.writer, level="warning").say("debug", "x", "y")
    JsonView(pipe.writer, level="warning").say("error", "x", "modèle", path="\udcff")
    record = json.loads(pipe.everything())
    assert (record["level"], record["event"], record["message"]) == ("error", "x", "modèle")


class Line:
    """A line whose text is found late. ``asked``: the threads that asked for it."""

    def __init__(self, text: str = "POST  /x") -> None:
        self._text = text
        self.asked: list[str] = []

    def text(self) -> str:
        self.asked.append(threading.current_thread().name)
        return self._text

    def fields(self) -> dict[str, int]:
        return {"status": 200}


def test_later_line_is_formatted_in_the_thread_of_the_writer(pipe: Pipe) -> None:
    line = Line("\x1b[31m/x")
    TextView(pipe.writer).say_later("info", "request", line)
    JsonView(pipe.writer).say_later("info", "request", line)
    text, record = pipe.everything().splitlines()
    assert text == "\\x1b[31m/x"
    shown = json.loads(record)
    assert (shown["level"], shown["event"], shown["status"]) == ("info", "request", 200)
    assert line.asked == ["output-writer"] * 2


def test_nothing_is_done_for_a_later_line_below_the_level(pipe: Pipe) -> None:
    line = Line()
    for view in (TextView(pipe.writer, level="warning"), JsonView(pipe.writer, level="warning")):
        assert not view.shows("info")
        view.say_later("info", "request", line)
    assert pipe.everything() == ""
    assert line.asked == []


def test_later_line_clears_the_live_line(pipe: Pipe) -> None:
    pipe.writer.is_terminal = True
    view = TextView(pipe.writer)
    view.show_activity("loading tiny")
    view.say_later("info", "request", Line())
    seen = pipe.everything()
    # Read as text, where "\r" is a line end, too. After it comes the live line again.
    assert "\x1b[2KPOST  /x\n\n\x1b[2K" in seen


def test_later_lines_are_dropped_and_counted_if_the_reader_lags(pipe: Pipe) -> None:
    view = TextView(pipe.writer)
    for _ in range(20 * MAX_LINES):
        view.say_later("info", "request", Line("x" * 100))
    assert pipe.writer.left_out > 0
    pipe.writer.close(timeout_s=0.01)  # returns although nothing was read


def test_slow_reader_loses_lines_but_no_events(pipe: Pipe) -> None:
    line = "x" * 999 + "\n"
    for _ in range(3 * MAX_LINES):
        pipe.writer.write(line)
    pipe.writer.write("event\n", keep=True)
    assert pipe.writer.left_out > 0
    pipe.writer.close(timeout_s=0.01)  # returns although nothing was read
    lines = []
    while (read := pipe.reader.readline()) != "event\n":
        lines.append(read)
    assert 64 < len(lines) < 3 * MAX_LINES


def test_closed_reader_is_no_error(pipe: Pipe) -> None:
    pipe.reader.close()
    pipe.writer.write("x\n")
    pipe.writer.close()
    pipe.writer.write("y\n")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (31_457_280, "30 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_memory_is_shown_in_three_digits(size: int, text: str) -> None:
    assert memory_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0843, "84 ms"), (0.9996, "1.0 s"), (3.21, "3.2 s"), (59.97, "1 min 0 s"), (125, "2 min 5 s")),
        *((179.9, "3 min 0 s"), (3599.9, "1 h 0 min"), (86400, "24 h 0 min"), (2_592_005, "30 d 0 h")),
    ],
)
def test_durations_are_shown_in_suitable_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_while_waiting_shows_live_line_and_removes_it(pipe: Pipe) -> None:
    pipe.writer.is_terminal = True
    with while_waiting(TextView(pipe.writer), "asking the runtimes"):
        assert os.read(pipe.reader.fileno(), 4) == b"\r\x1b[2"  # comes while the block runs
    seen = pipe.everything()
    assert "asking the runtimes · " in seen
    assert seen.endswith("\x1b[2K")


def test_short_wait_shows_no_live_line(pipe: Pipe) -> None:
    pipe.writer.is_terminal = True
    with while_waiting(TextView(pipe.writer), "asking the runtimes"):
        pass
    assert pipe.everything() == ""


def test_server_log_keeps_its_lines_and_its_control_characters_are_escaped(pipe: Pipe) -> None:
    TextView(pipe.writer, level="error").show_server_log([b"0.0 I srv  main: \xff", b"two"])
    pipe.writer.is_terminal = True
    TextView(pipe.writer).show_server_log([b"\x1b[2Jthree"])
    pipe.writer.is_terminal = False
    JsonView(pipe.writer).show_server_log([b"four", b"five"])
    *text, four, five = pipe.everything().splitlines()
    assert text[:2] == ["0.0 I srv  main: \ufffd", "two"]
    assert "\x1b" not in text[2]
    assert text[2].endswith("three")
    assert [json.loads(line)["message"] for line in (four, five)] == ["four", "five"]
    assert json.loads(four)["event"] == "server_log"


def test_unread_flood_is_dropped_without_waiting() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream:
        writer = OutputWriter(stream)
        view = TextView(writer)
        for _ in range(200):
            view.show_server_log([b"x" * 65536])
        assert writer.is_behind
        assert writer.held < 2 * MAX_BYTES
        os.close(read_end)
        writer.close(timeout_s=60)


def test_text_that_cannot_be_made_does_not_count_as_held(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> str:
        raise RuntimeError("no such luck")

    pipe.writer.write_later(fails)
    pipe.writer.write("x" * (MAX_BYTES + 1))  # in the same batch
    pipe.writer.close(timeout_s=60)
    assert pipe.writer.held == 0
    assert len(caplog.messages) == 1
