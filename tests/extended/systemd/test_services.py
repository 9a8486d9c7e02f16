"""Services under a real systemd, installed as people install them.

Each test has a unit of its own; they share one booted systemd (``machine.py``). Where the memory controller
is only in the old cgroup tree, the test that needs it boots another one there.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.extended.systemd.machine import INSIDE, PATIENCE_S, Machine, boot, reason_to_skip
from tests.extended.systemd.service import Service, copy_model, install_fake_server
from tests.kit.paths import ROOT
from tests.kit.patience import eventually
from tests.kit.ports import free_port

REASON = reason_to_skip()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with boot(tmp_path_factory.mktemp("machine")) as machine:
        yield machine


def test_sandboxed_service_serves_a_model_in_a_home(machine: Machine, tiny_model: Path, runtime: str) -> None:
    """With its own short-lived user, and with the real server: what the sandbox forbids, it does without."""
    home = Path("/home/alice/my models")
    source = copy_model(machine, tiny_model)
    machine.run("mkdir", "-p", str(home))
    machine.run("cp", str(source), str(home / "100% tiny.gguf"))
    machine.run("chmod", "700", "/home/alice")
    machine.run("sh", "-c", "echo private > /home/alice/letter")
    service = Service(machine, home / "100% tiny.gguf", runtime=runtime)
    service.start()
    assert service.show("StatusText").startswith("serving 100% tiny at http://127.0.0.1:")
    assert service.answer() == 8
    main = machine.main(service.unit)
    assert main.uids().real not in (0, 65534)
    (server,) = [process for process in machine.pids(service.unit) if "--model" in process.cmdline()]
    if {"mmap+mlock", "--mlock"} & set(server.cmdline()):
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert "VmLck:\t       0 kB" not in status  # LimitMEMLOCK=, and the call filter lets it
    seen = Path(f"/proc/{main.pid}/root/home")
    assert [path.name for path in seen.rglob("*") if path.is_file()] == ["100% tiny.gguf"]
    status_json = machine.llamasup("service", "status", service.name, "--json").stdout
    assert '"active": "active"' in status_json
    assert f'"pid": {service.show("MainPID")}' in status_json
    service.remove()
    assert service.show("LoadState") == "not-found"
    assert machine.run("ls", "/run/llamasup").stdout == ""


def test_start_waits_for_the_load_longer_than_its_time_out(machine: Machine, tiny_model: Path) -> None:
    """EXTEND_TIMEOUT_USEC=; and READY=1 is the token's: `systemctl start` returns with it."""
    runtime = install_fake_server(machine, "load_s=12")
    service = Service(machine, copy_model(machine, tiny_model), runtime=runtime, TimeoutStartSec="10")
    with ThreadPoolExecutor() as threads:
        started = threads.submit(service.start)
        service.wait_until(StatusText="~loading", ActiveState="activating")
        started.result(PATIENCE_S)
    assert service.show("ActiveState") == "active"
    assert service.show("StatusText").startswith("serving")
    service.remove()


def test_hanging_event_loop_is_killed_and_restarted(machine: Machine, tiny_model: Path) -> None:
    runtime = install_fake_server(machine)
    service = Service(machine, copy_model(machine, tiny_model), runtime=runtime, WatchdogSec="8")
    service.start()
    before = machine.pids(service.unit)
    machine.main(service.unit).send_signal(signal.SIGSTOP)
    service.wait_until(NRestarts="1", ActiveState="active", StatusText="~serving")
    assert [process for process in before if process.is_running()] == []
    assert service.answer() == 8
    service.remove()


def test_stop_during_the_load_succeeds_at_once(machine: Machine, tiny_model: Path) -> None:
    service = Service(
        machine, copy_model(machine, tiny_model), runtime=install_fake_server(machine, "load_s=600")
    )
    service.start("--no-block")
    service.wait_until(StatusText="~loading")
    service.machine.systemctl("stop", service.unit)
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    assert service.show("ExecMainStatus") == "0"
    service.remove()


def test_reload_finishes_streams_and_keeps_the_supervisor_process(machine: Machine, tiny_model: Path) -> None:
    (go := machine.work / "go").touch()
    runtime = install_fake_server(machine, "load_s=600", "stall_after=1", f"until={INSIDE / go.name}")
    service = Service(machine, copy_model(machine, tiny_model), runtime=runtime)
    service.start()
    go.unlink()
    main = service.show("MainPID")
    with (
        ThreadPoolExecutor() as threads,
        httpx.stream(
            "POST",
            f"{service.url}/completion",
            json={"prompt": "x", "n_predict": 8, "stream": True},
            timeout=PATIENCE_S,
        ) as stream,
    ):
        lines = stream.iter_lines()
        first = next(lines)
        reloaded = threads.submit(machine.systemctl, "reload", service.unit)
        service.wait_until(StatusText="~restarting", ActiveState="reloading")
        go.touch()
        text = "\n".join([first, *lines])
        assert '"stop": true' in text or '"stop":true' in text
        reloaded.result(PATIENCE_S)
        # It returned when the model served: nothing has to be waited for.
        assert service.show("StatusText").startswith("serving")
    service.wait_until(ActiveState="active")
    assert service.show("MainPID") == main
    assert "is ready again" in machine.logs()
    service.remove()


def test_deterministic_error_is_not_restarted(machine: Machine, tiny_model: Path) -> None:
    model = copy_model(machine, tiny_model, "spoilt.gguf")
    service = Service(machine, model, runtime=install_fake_server(machine))
    (machine.work / "spoilt.gguf").write_bytes(b"GGUF, but no more")
    assert "failed" in machine.run("systemctl", "start", service.unit, check=False).stderr
    service.wait_until(ActiveState="failed")
    assert (service.show("ExecMainStatus"), service.show("NRestarts")) == ("65", "0")
    service.remove()

    def units() -> str:
        return machine.run("systemctl", "list-units", "--all", "--plain").stdout

    # systemd drops a unit when nothing needs it any more, which is a little after the command.
    eventually(lambda: service.unit not in units(), every_s=0.1)


def test_crash_loop_ends_with_75_and_is_restarted(machine: Machine, tiny_model: Path) -> None:
    """Six crashes with growing pauses, 15 s or so; then systemd's turn."""
    runtime = install_fake_server(machine, "signal=load:SIGSEGV")
    service = Service(machine, copy_model(machine, tiny_model), runtime=runtime, RestartSec="3")
    service.start("--no-block")
    service.wait_until(StatusText="~(2 of 5)")
    service.wait_until(ExecMainStatus="75", SubState="auto-restart")
    assert "Gave up after 6 crashes" in machine.logs()
    service.wait_until(NRestarts="1")
    service.remove()


def test_connection_starts_the_service_and_is_served(machine: Machine, tiny_model: Path) -> None:
    port = free_port()
    service = Service(
        machine, copy_model(machine, tiny_model), runtime=install_fake_server(machine, "load_s=1")
    )
    (machine.work / "unit.socket").write_text(f"[Socket]\nListenStream=127.0.0.1:{port}\n")
    socket_unit = service.unit.replace(".service", ".socket")
    machine.run("cp", str(INSIDE / "unit.socket"), f"/run/systemd/system/{socket_unit}")
    machine.systemctl("daemon-reload")
    machine.systemctl("start", socket_unit)
    assert service.show("ActiveState") == "inactive"
    answer = httpx.post(
        f"http://127.0.0.1:{port}/completion", json={"prompt": "x", "n_predict": 4}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200
    assert service.url == f"http://127.0.0.1:{port}"
    machine.systemctl("stop", socket_unit)
    service.remove()


MEMORY_HOG = """#!{python}
import os, sys, threading, time
sys.path.insert(0, {root!r})
started_s = time.clock_gettime(time.CLOCK_REALTIME)

def eat():
    while not (os.path.exists("/run/test/eat") and os.stat("/run/test/eat").st_mtime > started_s):
        time.sleep(0.05)
    hoard = b"x" * (1 << 30)

threading.Thread(target=eat, daemon=True).start()
from tests.kit.fake_server import main
sys.exit(main(["--fake", "load_s=1", *sys.argv[1:]]))
"""


def test_out_of_memory_ends_the_child_and_not_the_service(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> None:
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    unified = controllers.exists() and "memory" in controllers.read_text().split()
    work = tmp_path_factory.mktemp("limited")
    memory_hog = work / "hungry"
    memory_hog.write_text(MEMORY_HOG.format(python=sys.executable, root=str(ROOT)))
    memory_hog.chmod(0o755)
    with boot(work, cgroups="v2" if unified else "v1") as machine:
        model, limit = copy_model(machine, tiny_model), {"MemoryMax": "300M", "MemorySwapMax": "0"}
        service = Service(machine, model, "--no-memory-check", runtime=str(INSIDE / "hungry"), **limit)
        service.start()
        main = service.show("MainPID")
        (work / "eat").touch()
        service.wait_until(StatusText="~restarting tiny after out of memory (1 of 5)")
        service.wait_until(StatusText="~serving", ActiveState="active")
        assert (service.show("MainPID"), service.show("NRestarts")) == (main, "0")
        assert service.answer() == 8
        service.remove()


def test_user_service_runs_under_the_manager_of_the_user(machine: Machine, tiny_model: Path) -> None:
    """Under a user's own manager, without root and without namespaces."""
    user = ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups", "env", "-i"]
    user += ["HOME=/home/bob", "XDG_RUNTIME_DIR=/run/user/4321", "PATH=/usr/bin:/bin", "LANG=C.UTF-8"]
    model = copy_model(machine, tiny_model)
    (machine.work / "bob.service").write_text(
        "[Service]\nUser=4321\nType=notify\nDelegate=yes\n"
        "Environment=XDG_RUNTIME_DIR=/run/user/4321 HOME=/home/bob\nExecStart=/lib/systemd/systemd --user\n"
    )
    machine.run(
        "sh",
        "-c",
        "install -d -m 700 -o 4321 -g 4321 /run/user /run/user/4321 /home/bob; chmod 755 /run/user",
    )
    bob = "bob:x:4321:4321::/home/bob:/bin/sh"
    machine.run(
        "sh", "-c", f"(cat /etc/passwd; echo {bob}) > /run/passwd && mount --bind /run/passwd /etc/passwd"
    )
    machine.run("cp", str(INSIDE / "bob.service"), "/run/systemd/system/")
    machine.systemctl("daemon-reload")
    machine.systemctl("start", "bob")
    llamasup = [*user, sys.executable, "-P", "-m", "llamasup", "service"]
    installed = machine.run(
        *(
            *llamasup,
            "install",
            str(model),
            "--user",
            "--now",
            "--port",
            "0",
            "--runtime",
            install_fake_server(machine),
        )
    )
    assert "is ready" in installed.stderr
    status = machine.run(*llamasup, "status", "tiny", "--user").stdout
    assert "serving tiny at http://127.0.0.1:" in status
    assert machine.run("ls", "/home/bob/.config/systemd/user").stdout.splitlines() == [
        "default.target.wants",
        "llamasup-tiny.service",
    ]
    machine.run(*llamasup, "uninstall", "tiny", "--user")
    assert "inactive" in machine.run(*llamasup, "status", "tiny", "--user").stdout
    machine.systemctl("stop", "bob")
