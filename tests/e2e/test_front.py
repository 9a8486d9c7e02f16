"""Where ``llamasup run`` listens: TLS, a Unix socket, and with few descriptors."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import llamasup, run_to_end, wrapped

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_certificate_makes_llamasup_serve_and_announce_https(
    tiny_model: Path, fake_server: Callable[..., str], certificate: tuple[str, str], tmp_path: Path
) -> None:
    chain, key = certificate
    ready_file = tmp_path / "ready.json"
    files = ("--tls-cert", chain, "--tls-key", key, "--ready-file", str(ready_file))
    with llamasup(tiny_model, "--runtime", fake_server(), *files) as running:
        url = running.url
        assert url.startswith("https://127.0.0.1:")
        assert json.loads(ready_file.read_text())["url"] == url
        context = ssl.create_default_context(cafile=chain)
        with httpx.Client(base_url=url, verify=context) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
                assert "[DONE]" in stream.read().decode()
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https", "http") + "/livez")
        assert running.stop() == 0
    assert "Traceback" not in running.stderr_text


def test_unix_socket_serves_requests_and_is_removed_at_the_end(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "llm.sock"
    with llamasup(tiny_model, "--runtime", fake_server(), "--host", f"{path}") as running:
        ready = running.wait_for("ready")
        assert (ready["host"], ready["port"]) == (str(path), None)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(base_url=ready["url"], transport=transport) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert running.stop() == 0
    assert not path.exists()


def test_llamasup_listens_on_every_address_of_a_list(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    hosts = f"127.0.0.1,127.0.0.2,{tmp_path}/llm.sock"
    with llamasup(tiny_model, "--runtime", fake_server(), "--host", hosts) as running:
        ready = running.wait_for("ready")
        assert ready["host"] == "127.0.0.1"
        assert httpx.get(f"http://127.0.0.2:{ready['port']}/livez").status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(uds=f"{tmp_path}/llm.sock")) as client:
            assert client.get("http://localhost/livez").status_code == 200
        assert running.stop() == 0


def test_allowed_hosts_and_origins_are_accepted(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    words = ("--allow-host", "llm.example.net", "--allow-origin", "https://chat.example.net")
    with llamasup(tiny_model, "--runtime", fake_server(), *words) as running:
        for host, code in (("llm.example.net:80", 200), ("other.example.net", 403)):
            assert httpx.get(f"{running.url}/livez", headers={"Host": host}).status_code == code
        for origin, code in (("https://chat.example.net", 200), ("https://other.example.net", 403)):
            answer = httpx.get(f"{running.url}/health", headers={"Origin": origin})
            assert answer.status_code == code
        assert running.stop() == 0


def test_all_clients_are_served_with_few_descriptors(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    """300 descriptors are 86 clients, 43 of each address."""
    few = ("sh", "-c", 'ulimit -n 300; exec "$@"', "sh")
    with llamasup(tiny_model, "--runtime", fake_server(), prefix=few) as running:
        host, port = httpx.URL(running.url).host, httpx.URL(running.url).port
        crowd = []
        for at in range(400):
            source = (f"127.0.2.{at // 20}", 0)
            crowd.append(socket.create_connection((host, port), source_address=source))
        assert httpx.post(f"{running.url}/v1/chat/completions", json=CHAT).status_code == 200
        assert psutil.Process(running.pid).num_fds() < 300
        for sock in crowd:
            sock.close()
        assert running.stop() == 0
    assert "Traceback" not in running.stderr_text


def test_descriptor_limit_is_raised_only_for_llamasup(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    low = ("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")
    with llamasup(tiny_model, "--runtime", fake_server(), prefix=low) as running:
        running.wait_for("ready")
        service = psutil.Process(running.pid)
        (child,) = [process for process in service.children() if str(tiny_model) in process.cmdline()]
        _, hard = service.rlimit(psutil.RLIMIT_NOFILE)
        assert service.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        assert child.rlimit(psutil.RLIMIT_NOFILE) == (256, hard)
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--tls-cert", "CHAIN"], 2, "--tls-cert without --tls-key"),
        (["--tls-key", "KEY"], 2, "--tls-key without --tls-cert"),
        (["--tls-cert", "KEY", "--tls-key", "CHAIN"], 78, "TLS cannot be served"),
        (["--tls-cert", "MISSING", "--tls-key", "KEY"], 78, "No such file"),
        (["--tls-cert", "CHAIN", "--tls-key", "KEY", "--host", "/tmp/x.sock"], 2, "protects nothing"),  # noqa: S108
        (["--host", "127.0.0.1,0.0.0.0"], 78, "--host 0.0.0.0 can be reached"),
        (["--host", ","], 2, "names no address"),
        (["--allow-origin", "*"], 2, "every web page"),
        (["--allow-host", "a:80"], 2, "has a port"),
    ],
)
def test_unusable_listen_options_are_refused_at_once(
    tiny_model: Path, certificate: tuple[str, str], tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    paths = (*certificate, str(tmp_path / "missing"))
    files = dict(zip(("CHAIN", "KEY", "MISSING"), paths, strict=True))
    done = run_to_end("run", str(tiny_model), "--port", "0", *(files.get(word, word) for word in words))
    assert done.returncode == code, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_wrap_accepts_allow_host_only_with_strict(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    server = fake_server()
    line = (server, "-m", str(tiny_model), "--port", "0")
    refused = run_to_end("wrap", "--allow-host", "llm.example.net", "--", *line)
    assert refused.returncode == 2
    assert "--strict" in refused.stderr
    with wrapped(*line, options=("--strict", "--allow-host", "llm.example.net")) as running:
        for host, code in (("llm.example.net", 200), ("other.example.net", 403)):
            assert httpx.get(f"{running.url}/health", headers={"Host": host}).status_code == code
        assert running.stop() == 0


def test_systemd_unit_passes_the_certificate_to_the_service(
    tiny_model: Path, certificate: tuple[str, str], tmp_path: Path
) -> None:
    chain, key = certificate
    words = (
        "service",
        "print",
        str(tiny_model),
        "--runtime",
        "embedded",
        "--tls-cert",
        chain,
        "--tls-key",
        key,
    )
    unit = run_to_end(*words, "--max-queued", "5", "--access-log", "-").stdout
    assert f"LoadCredential=tls-cert:{chain}" in unit
    assert f"LoadCredential=tls-key:{key}" in unit
    assert "--tls-cert %d/tls-cert --tls-key %d/tls-key" in unit
    assert "--max-queued 5" in unit
    assert "--access-log -" in unit
    done = run_to_end(*words, "--access-log", "/var/x")
    assert done.returncode == 78
    assert "below /var/lib/llamasup/tiny, which belongs to the service" in done.stderr
