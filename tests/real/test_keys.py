"""Key files in llamasup and in a real llama-server, and the tokens that answers cost a key."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from llamasup.core.auth.api_key import KeyRing, read_key_lines
from tests.core.proxy.rig import PATIENCE_S, Wire, status
from tests.e2e.driver import llamasup, wrapped
from tests.kit.models import tiny_lora
from tests.real.test_security import child_socket, status_without_proxy

pytestmark = pytest.mark.one_runtime

# The whole line is the key, with blanks and `=`. A line that begins with a hash is a comment.
FILE = "plain\n# comment\nwith space\na=b\ntrailing==\n\n#x\nclé\nlast"
CANDIDATES = [
    *("plain", "# comment", "comment", "with space", "with", "a=b", "a", "trailing==", "#x", "clé", "cle"),
    *("last", "wrong"),
]


def test_plain_key_file_admits_the_same_keys_as_in_llama_server(
    llama_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    ring = KeyRing([line.key for line in read_key_lines(FILE, "", salt=b"s")])
    admitted = [key for key in CANDIDATES if ring.find((key.encode(),)) is not None]

    words = (llama_server, "-m", str(tiny_model), "--api-key-file", str(path), "--port", "0", "-c", "256")
    with wrapped(*words) as running, httpx.Client(base_url=running.url) as http:
        admitted_by_server = [
            key
            for key in CANDIDATES
            if http.get("/props", headers=[(b"Authorization", b"Bearer " + key.encode())]).status_code == 200
        ]
        assert running.stop() == 0
    assert admitted == admitted_by_server == ["plain", "with space", "a=b", "trailing==", "clé", "last"]

    with (
        llamasup(tiny_model, "--runtime", llama_server, "--api-key-file", str(path)) as running,
        httpx.Client(base_url=running.url) as http,
    ):
        admitted_by_run = [
            key
            for key in CANDIDATES
            if http.get("/props", headers=[(b"x-api-key", key.encode())]).status_code == 200
        ]
        assert running.stop() == 0
    assert admitted_by_run == admitted_by_server


@pytest.mark.check("X4", "with a real server")
def test_inference_key_sees_no_paths_and_changes_no_adapter(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    path, adapter = tmp_path / "keys", tmp_path / "adapter.gguf"
    path.write_text("one\nboth rights=inference,control\n")
    path.chmod(0o600)
    adapter.write_bytes(tiny_lora())
    arguments = ("--runtime", runtime, "--api-key-file", str(path), "--", "--lora", str(adapter))
    with llamasup(tiny_model, *arguments) as running, httpx.Client(base_url=running.url) as http:
        one, both = ({"Authorization": f"Bearer {key}"} for key in ("one", "both"))
        for path_asked in (
            "/props",
            "/lora-adapters",
            "/slots",
            "/v1/models",
            "/metrics",
            "/health",
            "/readyz",
        ):
            partial = http.get(path_asked, headers={**one, "Range": "bytes=0-2000"})
            for answer in (http.get(path_asked, headers=one), partial):
                assert answer.status_code == 200
                assert str(tmp_path) not in answer.text, path_asked
                assert str(tiny_model.parent) not in answer.text, path_asked
        redacted, complete = (http.get("/props", headers=key).json() for key in (one, both))
        assert (redacted["model_path"], complete["model_path"]) == (tiny_model.name, str(tiny_model))
        assert redacted | {"model_path": str(tiny_model)} == complete
        (shown_adapter,), (full_adapter,) = (
            http.get("/lora-adapters", headers=key).json() for key in (one, both)
        )
        assert (shown_adapter["path"], full_adapter["path"]) == (adapter.name, str(adapter))
        for key in (one, both):
            closed = http.post("/lora-adapters", json=[{"id": 0, "scale": 0.0}], headers=key)
            assert (closed.status_code, closed.json()["error"]["cause"]) == (403, "closed_path")
        assert http.get("/lora-adapters", headers=one).json() == [shown_adapter]
        assert running.stop() == 0


@pytest.mark.check("X8", "404, and 429 beyond the limit")
def test_odd_spellings_of_inference_paths_do_not_reach_a_real_server(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("one rpm=2\n")
    path.chmod(0o600)
    body = b'{"prompt": "Once", "max_tokens": 1}'
    arguments = ("--runtime", runtime, "--api-key-file", str(path))
    with llamasup(tiny_model, *arguments) as running:
        port, child = int(running.wait_for("ready")["port"]), child_socket(running)

        def ask(spelled: bytes) -> tuple[int, str]:
            lines = b" HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: one\r\nContent-Length: %d\r\n\r\n" % len(
                body
            )
            raw = b"POST " + spelled + lines + body
            if status_without_proxy(child, raw) == 200:
                accepted.add(spelled)
            wire = Wire(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            wire.send(raw)
            head, answer = wire.message()
            wire.close()
            return status(head), str(json.loads(answer).get("error", {}).get("cause", ""))

        accepted: set[bytes] = set()
        odd = (b"/v1/%63ompletions", b"/v1/%u0063ompletions", b"/v1%2fcompletions", b"/v1/completion%73")
        for spelled in odd:
            assert (spelled, ask(spelled)) == (spelled, (404, "path_spelling"))
        assert ask(b"/v1/completions") == (200, "")
        assert ask(b"/v1/systemone")[0] == 501  # known to llama-server: this model makes no decisions
        assert ask(b"/v1/systemone") == ask(b"/v1/completions") == (429, "key_requests")
        assert accepted == {*odd, b"/v1/completions"}
        assert running.stop() == 0


def test_token_limits_use_the_counts_of_the_server(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one name=a tpm=60\ntwo name=b\n")
    path.chmod(0o600)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "ignore_eos": True}
    arguments = ("--runtime", runtime, "--api-key-file", str(path))
    with llamasup(tiny_model, *arguments) as running, httpx.Client(base_url=running.url) as http:

        def ask(key: str, **more: object) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return http.post("/v1/chat/completions", json=body | more, headers=headers, timeout=60)

        usage = ask("one", max_tokens=200).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]  # cached tokens of the warm-up cost nothing
        cost = usage["prompt_tokens"] - cached + usage["completion_tokens"]
        assert cost > 200
        refused = ask("one")
        assert refused.status_code == 429
        assert refused.json()["error"]["cause"] == "key_tokens"
        # A minute's 60 are used up; the others flow in at one each second, some while the answer was made.
        assert cost - 60 - 20 <= int(refused.headers["retry-after"]) <= cost - 60 + 1

        path.write_text("one name=c tpm=60\ntwo name=b\nthree name=d\n")
        while ask("three", max_tokens=1).status_code == 401:  # until the file is read again, within a second
            pass
        stream = ask("one", stream=True, max_tokens=100).text
        assert json.loads(stream.split("data: ")[-2])["timings"]["predicted_n"] == 100
        assert ask("one", stream=True).status_code == 429
        assert ask("two").status_code == 200
        assert running.stop() == 0
