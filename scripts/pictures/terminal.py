"""Runs commands in a pseudo-terminal and draws what they printed into docs/images/NAME.svg.

    python -m scripts.pictures terminal [run] [chat] [launch]

``run``: while the demo serves, the script makes llama-server crash (SIGSEGV), so that the picture shows the
diagnosis and the restart. Then it presses Ctrl-C. ``chat``: two questions to the demo, and a command.
``launch``: Claude Code (on PATH) does a task with the model of tests/kit/scripted.py, whose answers are a
script. All of it is real output, except for the line with the prompt. PATH chooses the llama-server, and HOME
the folder of the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from fcntl import ioctl
from html import escape
from pathlib import Path
from types import MappingProxyType

import pyte

from scripts.pages import ROOT
from tests.kit.scripted import Call, scripted

IMAGES = ROOT / "docs" / "images"
COMMAND = ("llamasup", "run", "demo")
CHAT = ("llamasup", "chat", "demo")
TASK = "Read notes.txt, and write its answer into answer.txt."
LAUNCH = ("llamasup", "launch", "claude", "agent.gguf", "--", "--dangerously-skip-permissions", "-p", TASK)
ANSWER = "The answer is in answer.txt: 42."

COLUMNS, ROWS = 120, 60
TIMEOUT_S = 60.0  # for each step of the run
SILENCE_S = 1.0  # the line that shows what is going on changes ten times a second
CHAR_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.4, 20, 14, 16
BACKGROUND, FOREGROUND, PROMPT = "#1b1f24", "#e6edf3", "#7ee787"
COLOURS = {
    "black": "#6e7681",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "brightblack": "#6e7681",
}

Lines = Sequence[Sequence[tuple[str, str]]]
"""The lines of a terminal: (character, colour or "") for each cell."""


def lines_of(output: str) -> Lines:
    """What a terminal shows after ``output``."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.Stream(screen).feed(re.sub(r"\x1b\[[<>=][\d;]*u", "", output))  # modes of the keyboard
    lines = [
        [(cell.data, COLOURS.get(cell.fg, "")) for cell in (screen.buffer[row][at] for at in range(COLUMNS))]
        for row in range(ROWS)
    ]
    used = max(row for row, text in enumerate(screen.display) if text.strip()) + 1
    return lines[:used]


class Run:
    """A command in a pseudo-terminal of ``COLUMNS`` columns."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] = MappingProxyType({})) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            terminal = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
            os.execvpe(command[0], command, {**os.environ, **terminal, **env})  # noqa: S606
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
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


@contextmanager
def recording(command: Sequence[str], env: Mapping[str, str] = MappingProxyType({})) -> Iterator[Run]:
    """Run a command, which must exit with 0 soon after the block. Raises SystemExit."""
    run = Run(command, env)
    try:
        yield run
        run.read_to_end()
        time.sleep(SILENCE_S)  # the process exits just after its terminal is closed
    finally:
        code = run.end()
    if code:
        raise SystemExit(f"exit code {code}:\n{run.output}")


def chat() -> str:
    """The output of a chat with the demo."""
    with recording(CHAT) as run:
        shows = lambda text: lambda: text in run.output  # noqa: E731
        run.read_until(shows(">>>"))
        for said, answered in (
            ("Hello!\r", " tok/s"),
            ("/system You tell short stories.\r", "The system prompt applies"),
            ("Tell me a story about a fox.\r", "prompt tokens cached"),
        ):
            run.press(said.encode())
            run.read_until(shows(answered))
        run.press(b"\x04")
    return run.output


def launch() -> str:
    """The output of Claude Code, which does a task with a model that llamasup starts for it."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        calls = (
            Call("Read", {"file_path": f"{folder}/notes.txt"}),
            Call("Write", {"file_path": f"{folder}/answer.txt", "content": "42\n"}),
        )
        Path("agent.gguf").write_bytes(scripted(calls, ANSWER))
        Path("notes.txt").write_text("The question is 6 x 7.\n")
        with recording(LAUNCH, {"IS_SANDBOX": "1"}) as run:  # else Claude Code refuses to run as root
            pass
        if Path("answer.txt").read_text() != "42\n":
            raise SystemExit(f"The task was not done:\n{run.output}")
    return run.output


def crash() -> str:
    """The output of a run whose llama-server crashes once."""
    with recording(COMMAND) as run:
        run.read_until(lambda: _served_by(run.pid) > 0)
        first = _served_by(run.pid)
        os.kill(first, signal.SIGSEGV)
        run.read_until(lambda: _served_by(run.pid) not in (0, first))
        run.press(b"\x03")
    return run.output


def _served_by(pid: int) -> int:
    """The process id of the llama-server that is ready in the run ``pid``; 0: none is."""
    command = [COMMAND[0], "ps", "--json", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    models = json.loads(done.stdout)["models"] if done.returncode == 0 else []
    return next((int(model["pid"]) for model in models if model["state"] == "ready"), 0)


def svg(lines: Lines, title: str) -> str:
    """A picture of ``lines``. ``textLength`` keeps the columns whatever the font of the viewer is."""
    width = 2 * MARGIN + CHAR_WIDTH * max(map(len, lines))
    height = 2 * MARGIN + LINE_HEIGHT * len(lines)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" font-family="ui-monospace, Menlo, Consolas, monospace"'
        f' font-size="{FONT_SIZE}" fill="{FOREGROUND}">',
        f"<title>{escape(title)} in a terminal</title>",
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


PICTURES: Mapping[str, tuple[Sequence[str], Callable[[], str]]] = {
    "run": (COMMAND, crash),
    "chat": (CHAT, chat),
    "launch": (LAUNCH, launch),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], default=list(PICTURES))
    parser.add_argument("--folder", type=Path, default=IMAGES)


def main(options: argparse.Namespace) -> int:
    if shutil.which(COMMAND[0]) is None:
        raise SystemExit(f"{COMMAND[0]} is not on PATH: put .venv/bin first on it")
    for name in options.names:
        command, recorded = PICTURES[name]
        words = shlex.join(command)
        prompt = [("$", PROMPT), *((character, "") for character in f" {words}")]
        (options.folder / f"{name}.svg").write_text(svg([prompt, *lines_of(recorded())], words), "utf-8")
    return 0
