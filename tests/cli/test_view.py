from __future__ import annotations

import json
import os
import re
import termios
from collections.abc import Iterator
from io import TextIOWrapper

import pytest

from llamasup.cli.output.view import JsonView, TextView, duration_text, while_waiting
from llamasup.cli.output.writer import MAX_BYTES, MAX_LINES, OutputWriter
from llamasup.system.text import display_width, memory_text


class Pipe:
    """Both ends of a pipe."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        self.stream: TextIOWrapper = os.fdopen(write_end, "w")

    def everything(self) -> str:
        self.stream.close()
        with os.fdopen(self.read_end) as reader:
            return reader.read()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    yield (made := Pipe())
    made.stream.close()


def test_off_a_terminal_there_is_no_live_line(pipe: Pipe) -> None:
    outlet = OutputWriter(pipe.stream)
    view = TextView(outlet)
    view.loading("loading tiny")
    view.tick()
    assert not view.is_busy
    view.say("info", "ready", "two\nlines")
    outlet.close()
    assert pipe.everything() == "two\nlines\n"


def test_what_a_file_is_called_does_not_steer_the_terminal(pipe: Pipe) -> None:
    outlet = OutputWriter(pipe.stream)
    outlet.is_terminal = True
    view = TextView(outlet)
    view.say("info", "found", "\x1b[31mred.gguf\nis here")
    view.loading("loading \x1b[2Jgone.gguf")
    outlet.close()
    seen = pipe.everything()
    assert seen.startswith("\\x1b[31mred.gguf\nis here\n")
    assert "loading \\x1b[2Jgone.gguf" in seen


@pytest.mark.parametrize("columns", [40, 80])
def test_the_live_line_stays_one_line_and_keeps_how_far_it_is(columns: int) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    stream = os.fdopen(theirs, "w")
    outlet = OutputWriter(stream)
    view = TextView(outlet)
    view.loading("downloading org/A-Model-With-A-Very-Long-Name-Instruct-GGUF:Q4_K_M 模型模型 · 12 of 80 GiB")
    view.tick()
    outlet.close()
    said = ""
    while len(re.findall(r"GiB · [\d.]+ m?s", said)) < 2:  # what was written comes when the kernel likes
        said += os.read(ours, 4096).decode()
    stream.close()
    shown = said.split("\r\x1b[2K")[1:]
    os.close(ours)
    assert len(shown) == 2
    for line in shown:
        assert columns - 3 < display_width(line) < columns
        assert "…" in line
        assert " 80 GiB · " in line


def test_a_line_below_the_level_is_not_written(pipe: Pipe) -> None:
    outlet = OutputWriter(pipe.stream)
    TextView(outlet, level="warning").say("info", "ready", "ready")
    JsonView(outlet, level="warning").say("debug", "x", "y")
    JsonView(outlet, level="warning").say("error", "x", "modèle", path="\udcff")
    outlet.close()
    record = json.loads(pipe.everything())
    assert (record["level"], record["event"], record["message"]) == ("error", "x", "modèle")


def test_a_reader_that_lags_loses_lines_and_keeps_what_must_be_kept(pipe: Pipe) -> None:
    outlet = OutputWriter(pipe.stream)
    line = "x" * 999 + "\n"
    for _ in range(3 * MAX_LINES):
        outlet.write(line)
    outlet.write("event\n", keep=True)
    assert outlet.left_out > 0
    outlet.close(timeout_s=0.01)  # returns, although nobody has read
    with os.fdopen(os.dup(pipe.read_end)) as reader:
        lines = []
        while (read := reader.readline()) != "event\n":
            lines.append(read)
    assert 64 < len(lines) < 3 * MAX_LINES


def test_a_reader_that_is_gone_is_no_error(pipe: Pipe) -> None:
    os.close(pipe.read_end)
    outlet = OutputWriter(pipe.stream)
    outlet.write("x\n")
    outlet.close()
    outlet.write("y\n")


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
def test_memory_is_told_in_three_digits(size: int, text: str) -> None:
    assert memory_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0843, "84 ms"), (0.9996, "1.0 s"), (3.21, "3.2 s"), (59.97, "1 min 0 s"), (125, "2 min 5 s")),
        *((179.9, "3 min 0 s"), (3599.9, "1 h 0 min"), (86400, "24 h 0 min"), (2_592_005, "30 d 0 h")),
    ],
)
def test_durations_are_told_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_who_waits_on_a_terminal_sees_what_for_and_the_line_is_gone_afterwards(pipe: Pipe) -> None:
    outlet = OutputWriter(pipe.stream)
    outlet.is_terminal = True
    with while_waiting(TextView(outlet), "asking the runtimes"):
        assert os.read(pipe.read_end, 4) == b"\r\x1b[2"  # comes while the block runs
    outlet.close()
    seen = pipe.everything()
    assert "asking the runtimes · " in seen
    assert seen.endswith("\x1b[2K")


def test_who_waits_for_hardly_any_time_sees_nothing(pipe: Pipe) -> None:
    outlet = OutputWriter(pipe.stream)
    outlet.is_terminal = True
    with while_waiting(TextView(outlet), "asking the runtimes"):
        pass
    outlet.close()
    assert pipe.everything() == ""


def test_the_log_of_a_server_keeps_its_lines_and_steers_no_terminal(pipe: Pipe) -> None:
    outlet = OutputWriter(pipe.stream)
    TextView(outlet, level="error").server_said([b"0.0 I srv  main: \xff", b"two"])
    outlet.is_terminal = True
    TextView(outlet).server_said([b"\x1b[2Jthree"])
    outlet.is_terminal = False
    JsonView(outlet).server_said([b"four", b"five"])
    outlet.close()
    *text, four, five = pipe.everything().splitlines()
    assert text[:2] == ["0.0 I srv  main: \ufffd", "two"]
    assert "\x1b" not in text[2]
    assert text[2].endswith("three")
    assert [json.loads(line)["message"] for line in (four, five)] == ["four", "five"]
    assert json.loads(four)["event"] == "server_log"


def test_a_flood_that_nobody_reads_is_left_out_and_waits_for_nothing() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream:
        outlet = OutputWriter(stream)
        view = TextView(outlet)
        for _ in range(200):
            view.server_said([b"x" * 65536])
        assert outlet.is_behind
        assert outlet.held < 2 * MAX_BYTES
        os.close(read_end)
        outlet.close()
