"""The threat model: what each right reaches at a running llamasup, and what no web page reaches with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from llamasup.core.system.native import native
from tests.e2e.driver import run_to_end, started
from tests.kit.patience import PATIENCE_S
from tests.real.remains import folders_of
from tests.security.reach import REACH, RIGHTS, Reach

KEYS = {"inference": "infer-key", "control": "control-key", "node": "node-key"}
_REFUSALS = {401, 403, 404}


@pytest.fixture(scope="module")
def clients(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, fake_server: Callable[..., str]
) -> Iterator[Mapping[str, tuple[httpx.Client, ...]]]:
    """By right, the clients that somebody who has it can use."""
    home = tmp_path_factory.mktemp("r")  # short: a socket lies below it
    (home / "keys").write_text(
        "infer-key name=infer\ncontrol-key name=ops rights=control\nnode-key name=n rights=inference,node\n"
    )
    (home / "keys").chmod(0o600)
    config = {
        "listen": "127.0.0.1:0",
        "runtime": fake_server(),
        "auth": {"api_key_file": str(home / "keys")},
        "batches": {"enabled": True},
        "models": {"tiny": {"path": str(tiny_model)}},
    }
    (home / "config.yaml").write_text(json.dumps(config))
    env = {**os.environ, **folders_of(home)}
    with ExitStack() as opened:
        running = opened.enter_context(started("serve", "--config", str(home / "config.yaml"), env=env))
        url = running.url

        def client(**headers: str) -> httpx.Client:
            made = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S)
            return opened.enter_context(made)

        token = run_to_end("ui", "--print", env=env).stdout.strip().partition("#token=")[2]
        session = httpx.post(f"{url}/llamasup/v1/console/session", json={"token": token}).json()
        (socket,) = home.glob("run/llamasup/*/control.sock")
        transport = httpx.HTTPTransport(uds=str(socket))
        private = opened.enter_context(
            httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S)
        )
        loaded = private.post("/llamasup/v1/models/tiny/load", json={})  # before that, it has no logs
        assert loaded.status_code == 200, loaded.text
        page = {
            "x-llamasup-console": session["secret"],
            "authorization": f"Bearer {session['inference_key']}",
        }
        yield {
            "none": (client(),),
            "console": (client(**page),),
            "local user": (private, client()),
            **{right: (client(authorization=f"Bearer {key}"),) for right, key in KEYS.items()},
        }
        assert running.stop() == 0


def asked(client: httpx.Client, thing: Reach, **headers: str) -> int:
    if thing.as_node:
        headers["x-llamasup-node"] = "other"
    return client.request(thing.method, thing.path, json=thing.body, headers=headers).status_code


@pytest.mark.skipif(not native.has_unix_sockets, reason="the private address is a Unix socket")
@pytest.mark.check("X4", "and nothing else")
@pytest.mark.parametrize("thing", REACH, ids=lambda thing: thing.what)
def test_right_reaches_what_the_threat_model_says(
    clients: Mapping[str, tuple[httpx.Client, ...]], thing: Reach
) -> None:
    statuses = {right: [asked(client, thing) for client in clients[right]] for right in RIGHTS}
    reached = {right for right, codes in statuses.items() if not _REFUSALS.issuperset(codes)}
    assert reached == thing.rights, statuses


@pytest.mark.skipif(not native.has_unix_sockets, reason="the private address is a Unix socket")
@pytest.mark.check("X3", "403")
@pytest.mark.parametrize("thing", REACH, ids=lambda thing: thing.what)
@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null"])
def test_page_of_another_site_reaches_nothing_with_any_right(
    clients: Mapping[str, tuple[httpx.Client, ...]], thing: Reach, origin: str
) -> None:
    for right in RIGHTS:
        assert asked(clients[right][-1], thing, origin=origin) == 403, right
