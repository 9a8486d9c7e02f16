"""The life of a server in a thread of its own: calls from many threads, interrupts, forks, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import llamasup
from llamasup.core.config.config_keys import Config, Http
from tests.kit.children import NewChildren
from tests.kit.patience import PATIENCE_S

TEXT = {"prompt": "Hi", "max_tokens": 8}


@pytest.fixture(autouse=True)
def no_leftovers(new_children: NewChildren) -> Iterator[None]:
    """Check that no child and no thread of llamasup is left."""
    yield
    assert new_children() == []
    assert [thread.name for thread in threading.enumerate() if thread.name == "llamasup"] == []


def test_server_serves_and_reports_its_models(fake: str, tiny_model: Path) -> None:
    with llamasup.serve(tiny_model, runtime=fake) as server:
        assert server.client.post("/v1/completions", json=TEXT).status_code == 200
        assert server.status()["models"][0]["state"] == "ready"
        assert server.why()["sentences"][0].startswith("tiny was loaded ")
        (ended,) = server.requests(ended=1)["ended"]
        with pytest.raises(llamasup.RequestUnknown):
            server.cancel(ended["request_id"])
        assert [row["requests"] for row in server.usage(by="day", since="1d")["rows"]] == [1]
        assert repr(server) == f"<llamasup.Server at {server.url}>"
        server.unload()
        server.load("tiny")
        server.restart()
        assert server.reload()["unchanged"] == ["tiny"]
        server.switch("demo", parallel=1)
        assert server.status()["models"][0]["slots"] == 1
    assert repr(server) == f"<llamasup.Server at {server.url} (ended)>"


def test_stop_ends_a_server_started_without_a_block(fake: str, tiny_model: Path) -> None:
    server = llamasup.serve(tiny_model, runtime=fake).start()
    assert server.client.get("/health").status_code == 200
    server.stop()
    server.stop()
    server.stop(now=True)


def test_synchronous_server_works_inside_a_running_event_loop(fake: str, tiny_model: Path) -> None:
    """As in a notebook."""

    async def cell() -> int:
        with llamasup.serve(tiny_model, runtime=fake) as server:
            return server.client.get("/health").status_code

    assert asyncio.run(cell()) == 200


def test_two_servers_do_not_affect_each_other(fake: str, tiny_model: Path) -> None:
    with llamasup.serve(tiny_model, runtime=fake) as first:
        with llamasup.serve(tiny_model, runtime=fake) as second:
            assert first.url != second.url
        assert first.client.get("/health").status_code == 200


def test_start_errors_are_raised_with_their_class(
    fake: str, fake_server: Callable[..., str], tiny_model: Path
) -> None:
    with pytest.raises(llamasup.ModelMissing), llamasup.serve("/nowhere/x.gguf", runtime=fake):
        pytest.fail("it serves")
    runtime = fake_server("out_of_memory=device")
    with pytest.raises(llamasup.ServerFailed), llamasup.serve(tiny_model, runtime=runtime):
        pytest.fail("it serves")


def test_server_cannot_be_entered_twice(fake: str, tiny_model: Path) -> None:
    serving = llamasup.serve(tiny_model, runtime=fake)
    with serving as server:
        with pytest.raises(llamasup.UsageInvalid, match="already"):
            serving.start()
        assert server.client.get("/health").status_code == 200
    with serving as again:
        assert again.client.get("/health").status_code == 200


def test_calls_after_the_end_raise_not_running(fake: str, tiny_model: Path) -> None:
    with llamasup.serve(tiny_model, runtime=fake) as server:
        client = server.client
        server.stop()
        requests: list[Callable[[], Any]] = [
            server.status,
            server.events,
            server.load,
            server.unload,
            server.restart,
            server.reload,
            lambda: server.switch("demo"),
            lambda: server.client,
        ]
        for request in requests:
            with pytest.raises(llamasup.NotRunning, match="has stopped"):
                request()
        assert client.is_closed


def test_leaving_the_block_lets_requests_of_other_threads_finish(
    fake_server: Callable[..., str], tiny_model: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    def finish(events: Iterator[Any]) -> None:
        """Let the requests continue (``until=``) once the server drains."""
        for event in events:
            if event.get("state") == "draining":
                go.touch()

    runtime = fake_server("token_s=600", f"until={go}")
    with ThreadPoolExecutor(4) as clients:
        with llamasup.serve(tiny_model, runtime=runtime, warm_up=False) as server:
            client = server.client
            answers = [clients.submit(client.post, "/v1/completions", json=TEXT) for _ in range(3)]
            await_in_flight(server, 3)
            clients.submit(finish, server.events())
        assert all(answer.done() for answer in answers)
    assert [answer.result().status_code for answer in answers] == [200] * 3


def test_exception_in_the_block_does_not_wait_for_requests(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    runtime = fake_server("stall_after=2")
    serving = llamasup.serve(tiny_model, runtime=runtime)
    with ThreadPoolExecutor(1) as clients, pytest.raises(ZeroDivisionError), serving as server:
        answer = clients.submit(server.client.post, "/v1/completions", json=TEXT)
        await_in_flight(server, 1)
        raise ZeroDivisionError
    assert answer.result().status_code in (502, 503)


def test_calls_of_many_threads_end_with_a_result_or_an_error_at_the_stop(fake: str, tiny_model: Path) -> None:
    outcomes: list[Any] = []

    def request(server: llamasup.Server) -> None:
        while True:
            try:
                server.status()
                server.load()
            except llamasup.LlamasupError as error:
                outcomes.append(type(error))
                return

    with ThreadPoolExecutor(8) as threads, llamasup.serve(tiny_model, runtime=fake) as server:
        for _ in range(8):
            threads.submit(request, server)
        assert server.client.get("/health").status_code == 200
    assert len(outcomes) == 8
    assert set(outcomes) <= {llamasup.NotRunning, llamasup.Stopping}


def test_events_start_with_the_call_and_end_with_the_server(fake: str, tiny_model: Path) -> None:
    with llamasup.serve(tiny_model, runtime=fake) as server:
        events, closed = server.events(), server.events()
        server.restart()
        closed.close()
        first = next(events)
        assert (first["event"], first["model"]) == ("state", "tiny")
    rest = list(events)
    assert "ready" in [event.get("state") for event in rest]
    assert rest[-1] == {"event": "stopped", "protocol": 1}
    assert list(closed) == []


def test_calls_in_a_forked_process_are_refused_with_the_url(fake: str, tiny_model: Path) -> None:
    with llamasup.serve(tiny_model, runtime=fake) as server:
        script = FORKED.format(url=server.url)
        pid = os.fork()
        if pid == 0:
            os._exit(_in_the_fork(server))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert server.status()["models"][0]["state"] == "ready"
        subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


def test_forked_process_does_not_keep_the_address(
    fake: str, tiny_model: Path, certificate: tuple[str, str]
) -> None:
    chain, key = map(Path, certificate)
    secure = Config(http=Http(tls_cert=chain, tls_key=key))
    for config in (None, secure):
        end_read, end = os.pipe()
        with llamasup.serve(tiny_model, runtime=fake, config=config) as server:
            port = int(server.url.rpartition(":")[2])
            pid = os.fork()
            if pid == 0:
                # A thread may be starting a process, and wait for the end of a pipe that is here now, too.
                for entry in Path("/proc/self/fd").iterdir():
                    number = int(entry.name)
                    if number > 2 and number != end_read and entry.is_fifo():
                        os.close(number)
                os.read(end_read, 1)
                os._exit(0)
        try:
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                pytest.fail("it is connected")
            with llamasup.serve(tiny_model, runtime=fake, config=config, port=port) as again:
                assert again.client.get("/health").status_code == 200
        finally:
            os.close(end)
            os.close(end_read)
            os.waitpid(pid, 0)


FORKED = "import httpx; assert httpx.get('{url}/health').status_code == 200"


def _in_the_fork(server: llamasup.Server) -> int:
    """The number of failed checks."""
    wrong = 0
    for request in (server.status, server.events, server.load, lambda: server.client):
        try:
            request()
            wrong += 1
        except llamasup.UsageInvalid:
            pass
    server.stop()  # nothing: it is the other process's
    return wrong


# --- interrupted -------------------------------------------------------------------------------------

SCRIPT = """
import sys, llamasup
try:
    with llamasup.serve({model!r}, runtime={runtime!r}, preload={preload}) as server:
        print("serving", flush=True)
        {block}
        print("over", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@contextmanager
def script(runtime: str, model: Path, block: str = "", *, preload: bool = True) -> Iterator[Any]:
    """A user's program, in its own session."""
    code = SCRIPT.format(model=str(model), runtime=runtime, block=block, preload=preload)
    words = [sys.executable, "-W", "error", "-c", code]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def await_child(pid: int, word: str) -> int:
    """Wait for a descendant with this word in its command line. Returns its process ID."""
    deadline = threading.Event()
    for _ in range(int(PATIENCE_S * 100)):
        for child in psutil.Process(pid).children(recursive=True):
            try:
                if word in child.cmdline():
                    return child.pid
            except psutil.NoSuchProcess:
                pass
        deadline.wait(0.01)
    pytest.fail(f"no child with {word}")


def await_in_flight(server: llamasup.Server, count: int) -> None:
    for _ in range(int(PATIENCE_S * 100)):
        if server.status()["models"][0]["in_flight"] >= count:
            return
        threading.Event().wait(0.01)
    pytest.fail("nothing is in flight")


def result_of(process: Any) -> tuple[str, str, int]:
    """Its standard output, its standard error, and its exit code."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return out, err, process.returncode


def test_ctrl_c_during_the_load_leaves_nothing_behind(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    with script(fake_server("load_s=1000"), tiny_model) as process:
        await_child(process.pid, "--model")
        process.send_signal(signal.SIGINT)
        assert result_of(process) == ("interrupted\n", "", 0)


def test_ctrl_c_in_the_block_leaves_nothing_behind(fake: str, tiny_model: Path) -> None:
    # A signal just before a long sleep would be handled only after it (CPython 3.11).
    sleep = "import time\n        while True: time.sleep(0.1)"
    with script(fake, tiny_model, sleep) as process:
        assert process.stdout.readline() == "serving\n"
        process.send_signal(signal.SIGINT)
        assert result_of(process) == ("interrupted\n", "", 0)


@pytest.mark.parametrize("block", ["server.load()", "list(server.events())"])
def test_ctrl_c_ends_a_waiting_call(block: str, fake_server: Callable[..., str], tiny_model: Path) -> None:
    runtime = fake_server("load_s=1000")
    requests = f"import threading; threading.Thread(target=server.load, daemon=True).start(); {block}"
    with script(runtime, tiny_model, requests, preload=False) as process:
        await_child(process.pid, "--model")
        process.send_signal(signal.SIGINT)
        out, err, code = result_of(process)
        assert (out, code) == ("serving\ninterrupted\n", 0)
        # Of the thread that nobody waits for: the interpreter may end in the middle of its words.
        assert not err or err.startswith("Exception in thread")


def test_ctrl_c_during_a_graceful_stop_stops_at_once(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    requests = (
        "import threading; "
        "ask = lambda: server.client.post('/completion', json={'prompt': 'x'}); "
        "threading.Thread(target=ask, daemon=True).start(); "
        "events = server.events(); "
        "tell = lambda: [print(each['state'], flush=True) for each in events if 'state' in each]; "
        "threading.Thread(target=tell, daemon=True).start(); "
        "[None for _ in iter(lambda: server.status()['models'][0]['in_flight'], 1)]"
    )
    with script(fake_server("stall_after=2"), tiny_model, requests) as process:
        lines = iter(process.stdout.readline, "")
        assert next(line for line in lines if line == "draining\n")
        process.send_signal(signal.SIGINT)
        out, err, code = result_of(process)
        assert out.endswith("interrupted\n"), err
        assert code == 0


@pytest.mark.parametrize(
    "how", ["sys.exit(3)", "import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"]
)
def test_program_that_exits_inside_the_block_leaves_no_process(
    how: str, fake: str, tiny_model: Path, own_folders: Path
) -> None:
    code = (
        "import sys, llamasup\n"
        f"server = llamasup.serve({str(tiny_model)!r}, runtime={fake!r}).start()\n"
        "print(*[each['pid'] for each in server.status()['models']], flush=True)\n"
        f"{how}\n"
    )
    words = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode in (3, -9)
    assert done.stderr == ""
    wait_until_gone(int(done.stdout))
    folder = own_folders / "run" / "llamasup"
    for _ in range(int(PATIENCE_S * 100)):
        if not list(folder.iterdir()):
            return
        threading.Event().wait(0.01)
    pytest.fail("the run folder is still there")


def test_exit_of_the_program_cancels_a_start_in_a_thread(
    fake_server: Callable[..., str], tiny_model: Path
) -> None:
    """As when a window is closed while a model loads."""
    code = (
        "import threading, llamasup\n"
        "def begin():\n"
        "    try: llamasup.serve({model!r}, runtime={runtime!r}).start()\n"
        "    except llamasup.NotRunning as error: print(error.message, flush=True)\n"
        "threading.Thread(target=begin).start()\n"
        "input()\n"
    ).format(model=str(tiny_model), runtime=fake_server("load_s=1000"))
    words = [sys.executable, "-W", "error", "-c", code]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            child = await_child(process.pid, "--model")
            out, err = process.communicate("\n", timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (out, err, process.returncode) == ("llamasup was stopped before it was ready.\n", "", 0)
    wait_until_gone(child)


def test_program_exits_even_if_no_thread_can_be_started(fake: str, tiny_model: Path) -> None:
    code = (
        "import threading, llamasup\n"
        "def start(thread): raise RuntimeError('no thread')\n"
        "threading.Thread.start = start\n"
        f"llamasup.serve({str(tiny_model)!r}, runtime={fake!r}).start()\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: no thread\n")


def wait_until_gone(pid: int) -> None:
    try:
        psutil.Process(pid).wait(PATIENCE_S)
    except psutil.NoSuchProcess:
        return
