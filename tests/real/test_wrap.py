"""``llamasup wrap`` of real llama-server command lines: clients see no difference from the bare server."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.driver import run_to_end, seconds_until_gone, wrapped
from tests.kit.runtimes import harmless_tool, reads_config_file
from tests.real.clients import (
    PATIENCE_S,
    Request,
    UnixConnection,
    bare_server,
    environment,
    free_port,
    response_to,
)

BEARER = {"Authorization": "Bearer key-b"}
SAME = {"temperature": 0, "seed": 1, "cache_prompt": False}
CHAT = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 12, **SAME}
COMPLETION = {"prompt": "Once", "n_predict": 12, **SAME}


@pytest.fixture(scope="module")
def program(runtime: str) -> list[str]:
    """The program with which a user's command line of this runtime begins."""
    return [sys.executable, "-m", "llamasup.embedded"] if runtime == "embedded" else [runtime]


@pytest.fixture(scope="module")
def env(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(None if runtime == "embedded" else runtime, tmp_path_factory.mktemp("wrap"))


@dataclass(frozen=True, slots=True)
class Pair:
    """Ports of two servers with the same command line: one bare, one through ``wrap``."""

    bare: int
    through: int

    def compare(self, *requests: Request) -> None:
        for request in requests:
            bare, through = (
                response_to(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S), request)
                for port in (self.bare, self.through)
            )
            assert through.status == bare.status, request
            assert through.body == bare.body, request
            assert through.headers == bare.headers, request


@pytest.fixture(scope="module")
def pair_of(
    program: list[str], env: dict[str, str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Pair]]:
    """Starts pairs that live as long as the module. ``{folder}`` becomes the folder of a server."""
    opened: list[object] = []

    def start(*words: str) -> Pair:
        ports = (free_port(), free_port())
        lines = []
        for port in ports:
            folder = str(tmp_path_factory.mktemp("own"))
            own = (word.replace("{folder}", folder) for word in words)
            lines.append([*program, "-m", str(tiny_model), "--port", str(port), *own])
        bare = bare_server(lines[0], env=env)
        bare.__enter__()
        opened.append(bare)
        through = wrapped(*lines[1], env=env)
        through.__enter__().wait_for("ready")
        opened.append(through)
        return Pair(*ports)

    yield start
    for opened_server in reversed(opened):
        opened_server.__exit__(None, None, None)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def with_keys(pair_of: Callable[..., Pair]) -> Pair:
    return pair_of(
        *("--api-key", "key-a,key-b", "--metrics", "--props", "--slot-save-path", "{folder}/"),
        *("--ctx-size", "2048", "--parallel", "1"),
    )


@pytest.fixture(scope="module")
def open_with_prefix(pair_of: Callable[..., Pair]) -> Pair:
    return pair_of("--api-prefix", "/llm/x", "--embedding", "--pooling", "mean")


def test_answers_to_clients_with_keys_are_the_same(with_keys: Pair) -> None:
    with_keys.compare(
        Request("GET", "/health"),
        Request("GET", "/v1/health"),
        Request("GET", "/props", headers=BEARER),
        Request("GET", "/v1/models", headers={"X-Api-Key": "key-a"}, numbers=True),
        Request("GET", "/models", headers=BEARER, numbers=True),
        Request("GET", "/metrics", headers=BEARER, numbers=True),
        Request("GET", "/lora-adapters", headers=BEARER),
        Request("POST", "/v1/chat/completions", CHAT, BEARER),
        Request("POST", "/v1/chat/completions", {**CHAT, "stream": True}, BEARER),
        Request("POST", "/completion", COMPLETION, BEARER),
        Request("POST", "/completion", {**COMPLETION, "stream": True}, BEARER),
        Request("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 5, **SAME}, BEARER),
        Request("POST", "/v1/messages", CHAT, BEARER),
        Request("POST", "/v1/responses", {"input": "Tell me.", "max_output_tokens": 5, **SAME}, BEARER),
        Request(
            "POST", "/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 3, **SAME}, BEARER
        ),
        Request("POST", "/tokenize", {"content": "byte for byte ✓"}, BEARER),
        Request("POST", "/detokenize", {"tokens": [5, 6, 7]}, BEARER),
        Request("POST", "/apply-template", CHAT, BEARER),
        Request("POST", "/v1/embeddings", {"input": "not enabled"}, BEARER),
        Request("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}, BEARER),
        Request("GET", "/slots", headers=BEARER, numbers=True),
    )


def test_invalid_keys_paths_methods_and_bodies_get_the_same_errors(with_keys: Pair) -> None:
    with_keys.compare(
        Request("GET", "/props"),
        Request("GET", "/props", headers={"Authorization": "Bearer wrong"}),
        Request("GET", "/props", headers={"Authorization": "Basic a2V5"}),
        Request("POST", "/v1/chat/completions", CHAT),
        Request("GET", "/nowhere", headers=BEARER),
        Request("GET", "/livez", headers=BEARER),
        Request("GET", "/llamasup/v1/status", headers=BEARER),
        Request("POST", "/health", {}, BEARER),
        Request("PATCH", "/props", {}, BEARER),
        Request("DELETE", "/slots", headers=BEARER),
        Request("HEAD", "/health"),
        Request("HEAD", "/props", headers=BEARER),
        Request("POST", "/v1/chat/completions", b"{not json", BEARER),
        Request("POST", "/v1/chat/completions", {"messages": "not a list"}, BEARER),
        Request("POST", "/completion", {"prompt": "word " * 5000}, BEARER, numbers=True),
    )


def test_routes_opened_by_flags_are_open(with_keys: Pair) -> None:
    save = {"filename": "slot.bin"}
    with_keys.compare(
        Request("POST", "/props", {}, BEARER),
        Request(
            "POST", "/completion", {**COMPLETION, "id_slot": 0, "cache_prompt": True}, BEARER, numbers=True
        ),
        Request("POST", "/slots/0?action=save", save, BEARER, numbers=True),
        Request("POST", "/slots/0?action=restore", save, BEARER, numbers=True),
        Request("POST", "/slots/0?action=erase", {}, BEARER, numbers=True),
        Request("POST", "/slots/9?action=erase", {}, BEARER, numbers=True),
        Request("GET", "/tools", headers=BEARER),
        Request("GET", "/cors-proxy?url=http://127.0.0.1:1/", headers=BEARER),
    )


def test_web_pages_get_the_cors_headers_of_llama_server(with_keys: Pair) -> None:
    page = {"Origin": "https://page.example"}
    with_keys.compare(
        Request("GET", "/health", headers=page),
        Request("GET", "/props", headers={**page, **BEARER}),
        Request("GET", "/props", headers=page),
        Request("OPTIONS", "/v1/chat/completions", headers={**page, "Access-Control-Request-Method": "POST"}),
        Request("OPTIONS", "/v1/chat/completions"),
        Request("GET", "/health", headers={"Origin": "null", "Host": "rebound.example"}),
    )


def test_prefix_embeddings_and_web_interface_work_the_same(open_with_prefix: Pair) -> None:
    open_with_prefix.compare(
        Request("GET", "/llm/x/health"),
        Request("GET", "/health"),
        Request("GET", "/llm/x/"),
        Request("GET", "/"),
        Request("GET", "/llm/x/props"),
        Request("POST", "/llm/x/v1/embeddings", {"input": ["one", "two"]}),
        Request("POST", "/llm/x/embedding", {"content": "one"}),
        Request("POST", "/llm/x/props", {}),
        Request("POST", "/v1/embeddings", {"input": "one"}),
    )


@pytest.mark.one_runtime
def test_static_files_and_ranges_are_served_the_same(pair_of: Callable[..., Pair], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>a page of the user's own</p>")
    (tmp_path / "large.bin").write_bytes(bytes(range(256)) * 4096)
    pair_of("--path", str(tmp_path)).compare(
        Request("GET", "/page.html"),
        Request("HEAD", "/page.html"),
        Request("GET", "/page.html", headers={"Range": "bytes=3-8"}),
        Request("GET", "/page.html", headers={"Range": "bytes=900-"}),
        Request("GET", "/large.bin", headers={"Range": "bytes=65536-65599"}),
        Request("GET", "/missing.html"),
        Request("GET", "/../../etc/passwd"),
        Request("GET", "/%2e%2e/%2e%2e/etc/passwd"),
        Request("POST", "/tokenize", b"{" + b" " * (33 << 20)),
    )


def test_tools_and_cors_proxy_stay_open_if_flags_open_them(
    pair_of: Callable[..., Pair], runtime: str
) -> None:
    if runtime == "embedded":
        pytest.skip("the embedded runtime has neither")
    tool = harmless_tool(runtime)
    pair_of("--tools", tool, "--ui-mcp-proxy").compare(
        Request("GET", "/tools"),
        Request("POST", "/tools", {"tool": tool, "params": {}}, numbers=True),
        Request("GET", "/cors-proxy?url=http://127.0.0.1:1/"),
        Request("GET", "/cors-proxy"),
        Request("GET", "/health", headers={"Origin": "http://localhost:3000"}),
        Request("GET", "/health", headers={"Origin": "https://page.example"}),
    )


@pytest.mark.one_runtime
def test_wrap_listens_on_several_hosts_and_a_unix_socket(
    runtime: str, program: list[str], env: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    port, path = free_port(), tmp_path / "front.sock"
    line = [*program, "-m", str(tiny_model), "--port", "1", "--port", str(port)]
    with wrapped(*line, "--host", f"127.0.0.1,{path},127.0.0.2", env=env) as running:
        assert running.url == f"http://127.0.0.1:{port}"
        health = Request("GET", "/health")
        seen = [
            response_to(http.client.HTTPConnection(host, port, timeout=PATIENCE_S), health)
            for host in ("127.0.0.1", "127.0.0.2")
        ]
        seen.append(response_to(UnixConnection(str(path)), health))
        assert [answer_seen.status for answer_seen in seen] == [200, 200, 200]
        assert running.stop() == 0
    assert not path.exists()


@pytest.mark.one_runtime
def test_wrap_listens_only_on_the_socket_given_as_host(
    program: list[str], env: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "only.sock"
    variables = {**env, "LLAMA_ARG_HOST": str(path)}
    with wrapped(*program, "-m", str(tiny_model), env=variables) as running:
        ready = running.wait_for("ready")
        assert (ready["host"], ready["port"]) == (str(path), None)
        assert (
            response_to(UnixConnection(str(path)), Request("POST", "/completion", COMPLETION)).status == 200
        )
        assert running.stop() == 0


def test_everything_but_the_address_reaches_the_child_unchanged(
    program: list[str], env: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    """The child has the user's folder and variables, and the arguments keep their order."""
    (tmp_path / "m.gguf").write_bytes(tiny_model.read_bytes())
    words = ["-c", "512", "--host", "127.0.0.1", "-m", "m.gguf", "--port", "0", "-np", "1", "--no-webui"]
    variables = {**env, "LLAMA_ARG_THREADS": "1", "LLAMA_ARG_PORT": "1", "MARK": "kept"}
    with wrapped("env", "A=1", *program, *words, env=variables, cwd=tmp_path) as running:
        running.wait_for("ready")
        (child,) = [process for process in running.children() if "m.gguf" in process.cmdline()]
        argv, environ, folder = child.cmdline(), child.environ(), child.cwd()
        assert running.stop() == 0
    at = argv.index("-c")
    address = argv[at + 2 : at + 4]
    assert address[0] == "--host"
    assert address[1].startswith(env["XDG_RUNTIME_DIR"])
    assert [*argv[at : at + 2], *argv[at + 4 :]] == ["-c", "512", "-m", "m.gguf", "-np", "1", "--no-webui"]
    assert folder == str(tmp_path)
    assert {name: environ.get(name) for name in ("A", "MARK", "LLAMA_ARG_THREADS", "LLAMA_ARG_PORT")} == {
        "A": "1",
        "MARK": "kept",
        "LLAMA_ARG_THREADS": "1",
        "LLAMA_ARG_PORT": None,
    }


def test_llama_cpp_config_file_is_applied_if_the_build_reads_it(
    llama_server: str, tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """llama.cpp/config.ini (#26118): llamasup applies its address and TLS, and the child reads the rest."""
    if not reads_config_file(llama_server):
        pytest.skip("this build reads no llama.cpp/config.ini")
    env = environment(llama_server, tmp_path_factory.mktemp("configured"))
    config = Path(env["XDG_CONFIG_HOME"]) / "llama.cpp" / "config.ini"
    config.parent.mkdir(parents=True)
    key, certificate = self_signed(tmp_path)
    port = free_port()
    config.write_text(
        f"port = {port}\nhost = 127.0.0.2\napi-prefix = /p\napi-key = k\n"
        f"[*]\nssl-key-file = {key}\nssl-cert-file = {certificate}\n[else]\nport = 1\n"
    )
    with wrapped(llama_server, "-m", str(tiny_model), env=env) as running:
        assert running.url == f"https://127.0.0.2:{port}"
        context = ssl.create_default_context(cafile=str(certificate))
        for headers, status in (({}, 401), ({"Authorization": "Bearer k"}, 200)):
            connection = http.client.HTTPSConnection("127.0.0.2", port, timeout=PATIENCE_S, context=context)
            assert response_to(connection, Request("GET", "/p/props", headers=headers)).status == status
        assert running.stop() == 0


def self_signed(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *(
                "-nodes",
                "-keyout",
                str(key),
                "-out",
                str(certificate),
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=IP:127.0.0.1,IP:127.0.0.2"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


@pytest.mark.one_runtime
def test_wrap_serves_tls_itself(
    program: list[str], env: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    key, certificate = self_signed(tmp_path)
    port = free_port()
    line = [*program, "-m", str(tiny_model), "--port", str(port), "--ssl-cert-file", str(certificate)]
    variables = {**env, "LLAMA_ARG_SSL_KEY_FILE": str(key)}
    context = ssl.create_default_context(cafile=str(certificate))
    with wrapped(*line, env=variables) as running:
        assert running.url == f"https://127.0.0.1:{port}"
        for request in (
            Request("GET", "/health"),
            Request("POST", "/completion", {**COMPLETION, "stream": True}),
        ):
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=context)
            assert response_to(connection, request).status == 200
        assert running.stop() == 0


@pytest.mark.one_runtime
def test_request_during_the_restart_after_a_crash_is_served(
    program: list[str], env: dict[str, str], tiny_model: Path
) -> None:
    port = free_port()
    with wrapped(*program, "-m", str(tiny_model), "--port", str(port), env=env) as running:
        running.wait_for("ready")
        (child,) = [process for process in running.children() if str(tiny_model) in process.cmdline()]
        child.kill()
        running.wait_for("exit", signal="SIGKILL")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        assert response_to(connection, Request("POST", "/completion", COMPLETION)).status == 200
        running.wait_for("state", state="ready", generation=2)
        assert running.stop() == 0


def test_sigterm_finishes_the_stream_in_flight_and_exits_with_0(
    program: list[str], env: dict[str, str], tiny_model: Path
) -> None:
    port = free_port()
    with wrapped(*program, "-m", str(tiny_model), "--port", str(port), env=env) as running:
        running.wait_for("ready")
        children = running.children()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        body = '{"prompt":"Once","n_predict":300,"ignore_eos":true,"stream":true}'
        connection.request("POST", "/completion", body=body)
        answer = connection.getresponse()
        answer.readline()
        running.send_signal(signal.SIGTERM)
        assert b'"stop":true' in answer.read()
        connection.close()
        assert running.end() == 0
        seconds_until_gone(children)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("-m", "/nowhere/m.gguf"), "/nowhere/m.gguf"),
        (("--ctx-size", "many"), "--ctx-size"),
        (("-m",), "-m"),
    ],
)
def test_invalid_command_line_ends_like_llama_server_itself(
    program: list[str], env: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    bare = subprocess.run([*program, *words], env=env, capture_output=True, timeout=PATIENCE_S, check=False)
    through = run_to_end("wrap", "--", *program, "--port", "0", *words, env=env)
    assert through.returncode == bare.returncode == 1
    assert said in through.stderr


def test_version_request_is_answered_by_llama_server(program: list[str], env: dict[str, str]) -> None:
    bare = subprocess.run([*program, "--version"], env=env, capture_output=True, text=True, check=False)
    through = run_to_end("wrap", "--", *program, "--version", env=env)
    assert (through.returncode, through.stdout, through.stderr) == (0, bare.stdout, bare.stderr)


@pytest.mark.one_runtime
def test_strict_refuses_requests_that_llama_server_accepts(
    program: list[str], env: dict[str, str], tiny_model: Path
) -> None:
    port = free_port()
    line = [*program, "-m", str(tiny_model), "--port", str(port), "--props", "--api-prefix", "/p"]
    with wrapped(*line, "--api-key", "k", options=["--strict"], env=env) as running:
        running.wait_for("ready")
        key = {"Authorization": "Bearer k"}

        def status(request: Request) -> int:
            return response_to(
                http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S), request
            ).status

        assert status(Request("GET", "/p/props", headers=key)) == 200
        assert status(Request("GET", "/p/props")) == 401
        assert status(Request("POST", "/p/props", {}, key)) == 403
        assert status(Request("POST", "/%70/props", {}, key)) == 403
        assert status(Request("GET", "/p/props", headers={"Host": "rebound.example"})) == 403
        assert status(Request("GET", "/p/props", headers={**key, "Origin": "https://page.example"})) == 403
        assert status(Request("GET", "/readyz")) == 200
        assert running.stop() == 0

    outside = run_to_end("wrap", "--strict", "--", *program, "--host", "0.0.0.0", "--port", "0", env=env)
    assert outside.returncode == 78
    assert "no API key" in outside.stderr


def test_router_is_wrapped_unchanged(
    llama_server: str, tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Only the binary has router mode. The processes of its models end with it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(tiny_model.read_bytes())
    env = environment(llama_server, tmp_path_factory.mktemp("router"))
    port = free_port()
    line = [llama_server, "--models-dir", "models", "--port", str(port), "--api-key", "k"]
    key = {"Authorization": "Bearer k"}
    with wrapped(*line, env=env, cwd=tmp_path) as running:
        running.wait_for("ready")

        def request(request: Request) -> tuple[int, str]:
            seen = response_to(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S), request)
            return seen.status, seen.body

        assert request(Request("GET", "/health"))[0] == 200
        assert '"role":"router"' in request(Request("GET", "/props", headers=key))[1]
        status, body = request(Request("POST", "/completion", {"model": "tiny", **COMPLETION}, key))
        assert (status, '"content"' in body) == (200, True)
        children = running.children()
        assert sum(child.name() == "llama-server" for child in children) == 2
        os.kill(running.pid, signal.SIGTERM)
        assert running.end() == 0
        seconds_until_gone(children)


@pytest.mark.check("X13")
def test_refused_requests_do_not_flood_standard_error(
    program: list[str], env: dict[str, str], tiny_model: Path
) -> None:
    command = [*program, "-m", str(tiny_model), "--port", str(port := free_port()), "--api-key", "key-b"]
    with wrapped(*command, options=["--server-log", "file"], env=env) as running:
        running.wait_for("ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        for _ in range(400):
            connection.request("GET", "/props")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 401
        connection.close()
        assert running.stop() == 0
        assert running.stderr_text.count("/props  401") < 200
        assert "more with status 401 in the last second" in running.stderr_text
