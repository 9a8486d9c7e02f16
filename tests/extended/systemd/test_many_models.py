"""``llamasup serve`` under a real systemd: many models, a config that is read again, downloads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.extended.systemd.machine import INSIDE, PATIENCE_S, Machine, boot, reason_to_skip
from tests.extended.systemd.service import Service, install_fake_server
from tests.kit.hub import running_hub

REASON = reason_to_skip()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with boot(tmp_path_factory.mktemp("machine")) as machine:
        yield machine


class Home:
    """A private home in the machine, with a config and models."""

    def __init__(self, machine: Machine, user: str) -> None:
        self.path = Path("/home") / user
        self._machine = machine
        machine.run("mkdir", "-p", str(self.path))
        machine.run("chmod", "700", str(self.path))

    def put(self, name: str, content: str | bytes, mode: str = "644") -> Path:
        """Replaces the file, like an editor."""
        path, part = self.path / name, self._machine.work / "part"
        part.write_bytes(content if isinstance(content, bytes) else content.encode())
        self._machine.run("mkdir", "-p", "-m", "755", str(path.parent))
        self._machine.run("install", "-m", mode, str(INSIDE / "part"), f"{path}.new")
        self._machine.run("mv", f"{path}.new", str(path))
        return path


CONFIG = """
models_dir: models
defaults: {{ctx_size: 512}}
models:
  a: {{preload: true}}
  {more}
auth: {{api_key_file: keys}}
http: {{access_log: ~/access.log}}
slots: {{keep: true}}
"""


def children(machine: Machine, service: Service) -> dict[str, psutil.Process]:
    """The model servers, by the file that each serves."""
    found = {}
    for process in machine.pids(service.unit):
        words = process.cmdline()
        if "--model" in words:
            found[Path(words[words.index("--model") + 1]).stem] = process
    return found


def test_many_models_start_change_and_stop_as_one_service(
    machine: Machine, tiny_model: Path, runtime: str
) -> None:
    """In the whole sandbox: config and models in a closed home, the key root's alone."""
    home = Home(machine, f"many-{Path(runtime).name}")
    for name in ("a", "b"):
        home.put(f"served/models/{name}.gguf", tiny_model.read_bytes())
    home.put("served/keys", f"{'k' * 40}\n", mode="600")
    home.put("letter", "private")
    config = home.put("served/config.yaml", CONFIG.format(more="b: {aliases: second}"))
    service = Service(machine, "--config", config, runtime=runtime)
    service.start()
    main = machine.main(service.unit)
    assert main.uids().real not in (0, 65534)
    assert service.show("StatusText").startswith("serving a, b at http://127.0.0.1:")
    assert children(machine, service).keys() == {"a"}

    with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client:
        body = {"prompt": "Once upon a time " * 20, "max_tokens": 4}
        assert client.post("/v1/completions", json={"model": "a", **body}).status_code == 401
        client.headers["Authorization"] = f"Bearer {'k' * 40}"
        for model in ("a", "second"):
            assert client.post("/v1/completions", json={"model": model, **body}).status_code == 200
        before = children(machine, service)
        assert before.keys() == {"a", "b"}
        seen = Path(f"/proc/{main.pid}/root/home")
        assert "letter" not in {path.name for path in seen.rglob("*")}

        # A changed config with a new model: unchanged models keep running.
        home.put("served/models/c.gguf", tiny_model.read_bytes())
        home.put("served/config.yaml", CONFIG.format(more="b: {aliases: other}\n  c: {preload: true}"))
        machine.systemctl("reload", service.unit)
        service.wait_until(ActiveState="active", StatusText="~serving a, b, c at ")
        assert client.post("/v1/completions", json={"model": "other", **body}).status_code == 200
        assert client.post("/v1/completions", json={"model": "second", **body}).status_code == 404
        assert client.post("/v1/completions", json={"model": "c", **body}).status_code == 200
        after = children(machine, service)
        assert (after["a"].pid, after["b"].pid) == (before["a"].pid, before["b"].pid)

        # An invalid config is rejected and reported; the service continues.
        home.put("served/config.yaml", CONFIG.format(more="b: {alias: other}"))
        assert machine.run("systemctl", "reload", service.unit, check=False).returncode != 0
        service.wait_until(ActiveState="active", StatusText="~config rejected")
        assert "models.b.alias: unknown key; did you mean aliases?" in machine.logs()
        assert client.post("/v1/completions", json={"model": "other", **body}).status_code == 200
        home.put("served/config.yaml", CONFIG.format(more="b: {aliases: other}"))
        machine.systemctl("reload", service.unit)
        assert "rejected" not in service.show("StatusText")
        assert children(machine, service)["b"].pid == before["b"].pid
        assert (service.show("NRestarts"), machine.main(service.unit).pid) == ("0", main.pid)

    # What it writes goes into folders of its own.
    machine.llamasup("unload", "b", "--pid", service.show("MainPID"))
    kept = machine.run("find", f"/var/cache/llamasup/{service.name}/slots/", "-type", "f").stdout
    assert kept.split()
    log = machine.run("cat", f"/var/lib/llamasup/{service.name}/access.log").stdout
    assert '"model":"b"' in log

    processes = machine.pids(service.unit)
    machine.systemctl("stop", service.unit)
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    assert [process for process in processes if process.is_running()] == []
    service.remove()
    assert machine.run("ls", "/run/llamasup").stdout == ""


def test_restart_of_one_of_many_models_is_not_a_reload(machine: Machine, tiny_model: Path) -> None:
    home = Home(machine, "anew")
    home.put("served/models/a.gguf", tiny_model.read_bytes())
    service = Service(
        machine, "--models-dir", home.path / "served/models", runtime=install_fake_server(machine)
    )
    service.start()
    assert service.answer(model="a") == 8
    pid = service.show("MainPID")
    restarted = machine.llamasup("restart", "a", "--pid", pid)
    assert "a is ready again" in restarted.stderr
    assert (service.show("ActiveState"), service.show("MainPID")) == ("active", pid)
    service.wait_until(StatusText="~serving a at ")
    service.remove()


def test_model_is_downloaded_into_the_folder_of_the_config(machine: Machine, tiny_model: Path) -> None:
    """It may write there and reach other machines, with a token that only root can read."""
    home = Home(machine, "away")
    with running_hub() as hub:
        hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": tiny_model.read_bytes()}
        hub.gated.add("org/tiny-GGUF")
        hub.token = "t0ken"
        home.put("served/token", "t0ken\n", mode="600")
        folder = home.path / "fetched"
        config = home.put(
            "served/config.yaml",
            f"models: {{tiny: {{repo: org/tiny-GGUF}}}}\n"
            f"downloads: {{folder: {folder}, endpoint: '{hub.url}', private_addresses: true, "
            "token_file: token}\n",
        )
        words = ("service", "install", "--config", str(config), "--runtime", install_fake_server(machine))
        missing = machine.llamasup(*words, check=False)
        assert (missing.returncode, f"the folder {folder} does not exist" in missing.stderr) == (78, True)
        machine.run("mkdir", "-m", "755", str(folder))
        closed = machine.llamasup(*words, check=False)
        assert (closed.returncode, "cannot write there" in closed.stderr) == (78, True)
        machine.run("chmod", "777", str(folder))
        service = Service(machine, "--config", config, runtime=install_fake_server(machine))
        service.start()
        assert service.show("StatusText").startswith("serving tiny at ")
        assert service.answer(model="tiny") == 8
        assert hub.asked
        files = machine.run("find", str(folder), "-name", "*.gguf").stdout.split()
        assert [Path(path).name for path in files] == ["tiny-Q4_K_M.gguf"]
        service.remove()
