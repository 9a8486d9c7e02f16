"""``llamasup chat`` with a real llama-server, in a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, command, llamasup
from tests.e2e.terminal import PROMPT, Terminal
from tests.kit.patience import eventually

pytestmark = pytest.mark.one_runtime

ANSWERING = "\\?2004l[^\x1b]{20}"  # text after the end of a prompt


@pytest.fixture
def demo(runtime: str) -> Iterator[Llamasup]:
    with llamasup("demo", "--runtime", runtime) as running:
        running.wait_for("ready")
        yield running


def ask(running: Llamasup, *arguments: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    argv = command("chat", "--pid", str(running.pid), *arguments)
    return subprocess.run(argv, input=text, capture_output=True, timeout=PATIENCE_S, check=False)


def test_question_in_a_pipe_gets_only_the_answer(demo: Llamasup) -> None:
    done = ask(demo, text=b"Tell me a story about a fox.\n")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")
    assert len(done.stdout.split()) > 20
    both = ask(demo, "--prompt", "Hello.", "--system", "You are a fox.", text=b"How are you?")
    assert (both.returncode, both.stdout[-1:]) == (0, b"\n")


@pytest.mark.parametrize(
    ("arguments", "text", "code", "message"),
    [
        ((), b" \n", 2, "The question is empty."),
        ((), b"\xff\xfe", 2, "Standard input is not UTF-8 text."),
        (("other",), b"Hi", 2, "The model 'other' is not served at "),
        (("--system", "\udcff"), b"Hi", 2, "The message or the system prompt is not UTF-8 text."),
        (("--image", "no.png"), b"Hi", 2, "The image 'no.png' cannot be read: No such file or directory."),
        (("demo", "--", "--ctx-size", "512"), b"Hi", 2, "Options after -- start a llamasup,"),
        ((), b"a story " * 5000, 69, "larger --ctx-size"),
    ],
    ids=["empty", "not text", "other model", "not UTF-8", "no image", "options", "long"],
)
def test_what_cannot_be_answered(
    demo: Llamasup, arguments: tuple[str, ...], text: bytes, code: int, message: str
) -> None:
    done = ask(demo, *arguments, text=text)
    assert done.returncode == code
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""


def test_chat_in_a_terminal(demo: Llamasup, tmp_path: Path) -> None:
    terminal = Terminal(command("chat", "--pid", str(demo.pid)), env={"HOME": str(tmp_path)})
    try:
        terminal.shows(r"demo at http://\S+ .*Ctrl-D leaves")
        terminal.shows(PROMPT)
        terminal.press("Hello.\r")
        terminal.shows(r"\d+ tokens .* context \d+ of 1,024")
        terminal.press("Tell me a story.\r")
        terminal.shows(r"\d+ of \d+ prompt tokens cached")
        terminal.press("/help\r")
        terminal.shows("/save PATH")
        terminal.press("/save ~nobody-of-this-name/chat.json\r")
        terminal.shows("cannot be written: No such file")
        terminal.press("/nonsense\r")
        terminal.shows("There is no command '/nonsense'.")
        for number in range(2):
            terminal.press(f"/save {tmp_path}/a:b:.json\r")
            terminal.shows("File exists" if number else r"Wrote \S+/a:b:\.json")
            terminal.shows(PROMPT)
        saved = tmp_path / "a:b:.json"
        assert stat.S_IMODE(saved.stat().st_mode) == 0o600
        roles = [message["role"] for message in json.loads(saved.read_text())["messages"]]
        assert roles == ["user", "assistant"] * 2
        terminal.press("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a:b:.json"]  # no history of what was typed


def test_ctrl_c_stops_the_answer_and_not_the_chat(runtime: str, tiny_model: Path) -> None:
    # This model writes words at random, and ends no answer by itself.
    with llamasup(tiny_model, "--runtime", runtime, "--ctx-size", "8192", "--parallel", "1") as running:
        running.wait_for("ready")
        terminal = Terminal(command("chat", "--pid", str(running.pid)))
        try:
            terminal.shows(PROMPT)
            for _ in range(2):
                terminal.press("Tell me all.\r")
                terminal.shows(ANSWERING)
                terminal.interrupt()
                terminal.shows(r"\(stopped\)")
                terminal.shows(PROMPT)
            terminal.press("/retry\r")
            terminal.shows(ANSWERING)
            terminal.terminate()
            assert terminal.end() == 128 + signal.SIGTERM
        finally:
            terminal.close()
        assert running.stop() == 0  # nothing is in flight


def test_chat_starts_a_llamasup_and_leaves_nothing(runtime: str, llama_server: str) -> None:
    terminal = Terminal(command("chat", "demo", "--", "--runtime", runtime))
    try:
        terminal.shows(PROMPT)
        children = psutil.Process(terminal.pid).children(recursive=True)
        assert children
        terminal.press("\x03")  # empties the line
        terminal.shows(PROMPT)
        terminal.press("Tell me a story.\r")
        terminal.shows(ANSWERING)
        terminal.interrupt()  # does not reach the llamasup that was started
        terminal.shows(PROMPT)
        terminal.press("Hello.\r")
        terminal.shows(r"\d+ tokens")
        os.kill(terminal.pid, signal.SIGKILL)
        eventually(lambda: not any(child.is_running() for child in children))
    finally:
        terminal.close()


def test_server_that_stops_ends_the_chat(demo: Llamasup) -> None:
    terminal = Terminal(command("chat", "--pid", str(demo.pid)), env={"PYTHONIOENCODING": "ascii"})
    try:
        terminal.shows(r"\\xb7")  # a letter that this terminal has not
        terminal.shows(PROMPT)
        assert demo.stop() == 0
        terminal.press("Hello.\r")
        shown = terminal.shows("No llamasup answers at .*")
        assert re.search("Traceback", shown) is None
        assert terminal.end() == 69
    finally:
        terminal.close()
