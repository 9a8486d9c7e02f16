"""A service under a booted systemd, installed as people install one."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import httpx

from tests.extended.systemd.machine import INSIDE, PATIENCE_S, Machine
from tests.kit.fake_server import install

__all__ = ["Service", "copy_model", "install_fake_server"]

NUMBERS = count()


class Service:
    """One installed unit. ``what`` is served, with its options: as ``service install`` takes them."""

    def __init__(self, machine: Machine, *what: str | Path, runtime: str, **add_drop_in: str) -> None:
        self.machine = machine
        self.name = f"test{next(NUMBERS)}"
        self.unit = f"llamasup-{self.name}.service"
        machine.llamasup(
            *("service", "install", *map(str, what)),
            *("--name", self.name, "--runtime", runtime, "--port", "0"),
        )
        lines = "\n".join(f"{key}={value}" for key, value in add_drop_in.items())
        machine.add_drop_in(self.unit, f"[Service]\nRestartSec=0\n{lines}\n")

    def start(self, *options: str) -> None:
        self.machine.systemctl("start", *options, self.unit)

    def show(self, name: str) -> str:
        return self.machine.show(self.unit)[name]

    def wait_until(self, **wanted: str) -> None:
        self.machine.wait_until(self.unit, **wanted)

    @property
    def url(self) -> str:
        """Waits for the status, which may come after the first answer."""
        deadline_s = time.monotonic() + PATIENCE_S
        while " at " not in (address := self.show("StatusText")):
            assert time.monotonic() < deadline_s, address
            time.sleep(0.05)
        return address.split(" at ")[1].split(",")[0].split(";")[0]

    def answer(self, **more: str) -> int:
        """Tokens of one completion, through the proxy. The network is the machine's own."""
        completion = httpx.post(
            f"{self.url}/completion",
            json={"prompt": "Once", "n_predict": 8, **more},
            timeout=PATIENCE_S,
        ).raise_for_status()
        tokens: int = completion.json()["tokens_predicted"]
        return tokens

    def remove(self) -> None:
        self.machine.systemctl("stop", self.unit)
        assert self.machine.pids(self.unit) == []
        self.machine.llamasup("service", "uninstall", self.name)


def copy_model(machine: Machine, source: Path, name: str = "tiny.gguf") -> Path:
    (machine.work / name).write_bytes(source.read_bytes())
    return INSIDE / name


def install_fake_server(machine: Machine, *faults: str) -> str:
    name = f"server{next(NUMBERS)}"
    install(machine.work / name, *faults)
    return str(INSIDE / name)
