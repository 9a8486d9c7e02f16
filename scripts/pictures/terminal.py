"""Runs `llamasup run demo` in a pseudo-terminal and draws what it printed into docs/images/run.svg.

    python -m scripts.pictures terminal

While the model serves, the script makes llama-server crash (SIGSEGV), so that the picture shows the diagnosis
and the restart. Then it presses Ctrl-C. All of it is real output, except for the line with the prompt. The
paths are those of this machine: PATH chooses the llama-server, and HOME the folder of the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fcntl import ioctl
from html import escape
from pathlib import Path

from scripts.pages import ROOT

PICTURE = ROOT / "docs" / "images" / "run.svg"
COMMAND = ("llamasup", "run", "demo")

COLUMNS = 120
TIMEOUT_S = 60.0  # for each step of the run
SILENCE_S = 1.0  # the line that shows what is going on changes ten times a second
CHAR_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.4, 20, 14, 16
BACKGROUND, FOREGROUND, PROMPT = "#1b1f24", "#e6edf3", "#7ee787"
COLOURS = ("#6e7681", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", FOREGROUND)

# A control sequence, a line feed with or without a carriage return, a carriage return, or text.
_PIECES = re.compile(r"\x1b\[(?P<arguments>[\d;?]*)(?P<control>[A-Za-z])|\r?\n|\r|[^\x1b\r\n]+|\x1b.")


@dataclass(slots=True)
class Screen:
    """The lines that a terminal shows after ``write``: (character, colour or "") for each cell."""

    columns: int
    lines: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    _column: int = 0
    _colour: str = ""

    def write(self, text: str) -> None:
        for piece in _PIECES.finditer(text):
            control, arguments = piece["control"], piece["arguments"]
            if control == "K":
                self.lines[-1] = [] if arguments == "2" else self.lines[-1][: self._column]
            elif control == "m":
                self._set_colour(arguments)
            elif control is None and piece[0].endswith("\n"):
                self._next_line()
            elif piece[0] == "\r":
                self._column = 0
            elif control is None and not piece[0].startswith("\x1b"):
                self._put(piece[0])

    def _put(self, text: str) -> None:
        for character in text:
            if self._column == self.columns:
                self._next_line()
            line = self.lines[-1]
            line += [(" ", "")] * (self._column + 1 - len(line))
            line[self._column] = character, self._colour
            self._column += 1

    def _next_line(self) -> None:
        self.lines.append([])
        self._column = 0

    def _set_colour(self, arguments: str) -> None:
        for code in map(int, filter(None, arguments.split(";") if arguments else ["0"])):
            if code in (0, 39):
                self._colour = ""
            elif code // 10 in (3, 9) and code % 10 < len(COLOURS):
                self._colour = COLOURS[code % 10]


class Run:
    """A command in a pseudo-terminal of ``COLUMNS`` columns."""

    def __init__(self, command: Sequence[str]) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color"})  # noqa: S606
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        self._bytes = b""

    def read_until(self, holds: Callable[[], bool]) -> None:
        """Read until ``holds`` is true and the command prints nothing for a second. Raises TimeoutError."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._read(SILENCE_S) or not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(self.output)

    def read_to_end(self) -> None:
        while self._read(TIMEOUT_S):
            pass

    def _read(self, timeout_s: float) -> bool:
        """Whether the command printed something within ``timeout_s``."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux: the command has closed its terminal
            return False
        self._bytes += data
        return bool(data)

    @property
    def output(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def end(self) -> int:
        """Its exit code. Kills the command if it has not ended."""
        if not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def recorded() -> str:
    """The output of a run whose llama-server crashes once."""
    run = Run(COMMAND)
    try:
        run.read_until(lambda: _served_by(run.pid) > 0)
        first = _served_by(run.pid)
        os.kill(first, signal.SIGSEGV)
        run.read_until(lambda: _served_by(run.pid) not in (0, first))
        run.press(b"\x03")
        run.read_to_end()
        time.sleep(SILENCE_S)  # the process ends just after its terminal is closed
    finally:
        code = run.end()
    if code:
        raise SystemExit(f"exit code {code}:\n{run.output}")
    return run.output


def _served_by(pid: int) -> int:
    """The process id of the llama-server that is ready in the run ``pid``; 0: none is."""
    command = [COMMAND[0], "ps", "--json", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    models = json.loads(done.stdout)["models"] if done.returncode == 0 else []
    return next((int(model["pid"]) for model in models if model["state"] == "ready"), 0)


def svg(lines: Sequence[Sequence[tuple[str, str]]]) -> str:
    """A picture of ``lines``. ``textLength`` keeps the columns whatever the font of the viewer is."""
    width = 2 * MARGIN + CHAR_WIDTH * max(map(len, lines))
    height = 2 * MARGIN + LINE_HEIGHT * len(lines)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" font-family="ui-monospace, Menlo, Consolas, monospace"'
        f' font-size="{FONT_SIZE}" fill="{FOREGROUND}">',
        f"<title>{escape(' '.join(COMMAND))} in a terminal</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
    ]
    for number, line in enumerate(lines, 1):
        y = MARGIN + LINE_HEIGHT * number - 6
        for start, text, colour in _spans(line):
            drawn.append(
                f'<text x="{MARGIN + CHAR_WIDTH * start:g}" y="{y:g}" xml:space="preserve"'
                f' textLength="{CHAR_WIDTH * len(text):g}"'
                + (f' fill="{colour}"' if colour else "")
                + f">{escape(text)}</text>"
            )
    return "\n".join([*drawn, "</svg>", ""])


def _spans(line: Sequence[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    """(first column, text, colour) of each part of one colour, without blanks at either end."""
    start = 0
    while start < len(line):
        end = start
        while end < len(line) and line[end][1] == line[start][1]:
            end += 1
        text = "".join(character for character, _ in line[start:end])
        blanks = len(text) - len(text.lstrip())
        if text.strip():
            yield start + blanks, text.strip(), line[start][1]
        start = end


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=PICTURE)


def main(options: argparse.Namespace) -> int:
    if shutil.which(COMMAND[0]) is None:
        raise SystemExit(f"{COMMAND[0]} is not on PATH: put .venv/bin first on it")
    screen = Screen(COLUMNS)
    screen.write(recorded())
    while not screen.lines[-1]:
        screen.lines.pop()
    prompt = [("$", PROMPT), *((character, "") for character in f" {' '.join(COMMAND)}")]
    output: Path = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(svg([prompt, *screen.lines]), "utf-8")
    return 0
