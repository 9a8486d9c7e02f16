"""``llamasup top`` in a real terminal, with the requests of a real llama-server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, command, llamasup
from tests.e2e.terminal import Terminal
from tests.extended.real.nodes import Node, nodes_in
from tests.extended.real.test_live_requests import ENDLESS, Reader

pytestmark = pytest.mark.one_runtime


@pytest.mark.parametrize(
    "ends", [lambda terminal: terminal.press("q"), lambda terminal: terminal.interrupt()]
)
def test_request_is_chosen_and_cancelled(
    runtime: str, tiny_model: Path, ends: Callable[[Terminal], None]
) -> None:
    options = ("--runtime", runtime, "--parallel", "1", "--ctx-size", "2048", "--", "--context-shift")
    with llamasup(tiny_model, *options) as running:
        running.wait_for("ready")
        terminal = Terminal(command("top", "--pid", str(running.pid)))
        try:
            assert "\x1b[?1049h" in terminal.shows(r"tiny +ready")  # the other screen of the terminal
            reader = Reader(running, "the-request", tokens=ENDLESS)
            terminal.shows("the-request")
            terminal.shows(r"generating")
            terminal.press("k")  # up, from the last line
            terminal.press("c")
            terminal.shows(r"Cancel the request the-request\?")
            terminal.press("y")
            assert reader.ended.wait(PATIENCE_S)
            assert '"cause":"cancelled"' in reader.text
            ends(terminal)
            terminal.shows(r"\x1b\[\?1049l")  # the screen from before
            assert terminal.end() in (0, 130)
        finally:
            terminal.close()
        assert running.stop() == 0


def test_models_and_requests_of_another_node_are_shown(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    def read_long_answer(front: Node) -> None:
        body = {"model": "tale", "prompt": "Once", "n_predict": ENDLESS, "ignore_eos": True, "stream": True}
        headers = {"X-Request-Id": "the-request"}
        with (
            front.client as client,
            client.stream("POST", "/completion", json=body, headers=headers) as answer,
            suppress(httpx.RemoteProtocolError),  # a cancelled stream has no last chunk
        ):
            answer.read()

    with nodes_in(tmp_path, runtime) as nodes, ThreadPoolExecutor(1) as reader:
        tale = {"path": str(tiny_model), "ctx_size": 2048, "parallel": 1, "preload": True}
        tale["extra"] = ["--context-shift"]
        front = nodes.start("front", {}, nodes.peer(nodes.start("desk", {"tale": tale})))
        terminal = Terminal(command("top", "--pid", str(front.process.pid)))
        try:
            terminal.shows(r"NAME +NODE +STATE")
            terminal.shows(r"tale +desk +ready")
            reading = reader.submit(read_long_answer, front)
            terminal.shows(r"the-request +desk +tale")
            terminal.press("j")  # down, to the model
            terminal.press("l")
            terminal.shows("The log is on the node desk")
            terminal.press("k")
            terminal.press("j")
            terminal.press("j")  # to the request
            terminal.press("c")
            terminal.shows(r"Cancel the request the-request\?")
            terminal.press("y")
            reading.result(PATIENCE_S)
            terminal.press("q")
            terminal.shows(r"\x1b\[\?1049l")
            assert terminal.end() == 0
        finally:
            terminal.close()
