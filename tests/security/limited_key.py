"""A key that has used up its limit, and the paths that llama-server would infer for."""

from __future__ import annotations

import re
from pathlib import Path

from llamasup.core.http.routes import route_of
from llamasup.core.proxy import ProxyConfig
from tests.core.proxy.key_files import keys_of
from tests.security.circuit import Circuit

__all__ = ["INFERENCE", "circuit_of_a_used_up_key", "gets_past_no_limit", "served_as"]

# Of llama-server b11434. llamasup does not know the last of them.
INFERENCE = (
    *(b"/completion", b"/completions", b"/v1/completions", b"/chat/completions", b"/v1/chat/completions"),
    *(b"/responses", b"/v1/responses", b"/v1/messages", b"/infill", b"/embedding", b"/embeddings"),
    *(b"/v1/embeddings", b"/rerank", b"/reranking", b"/v1/rerank", b"/v1/reranking"),
    *(b"/audio/transcriptions", b"/v1/audio/transcriptions", b"/v1/systemone"),
)


def circuit_of_a_used_up_key(folder: Path) -> Circuit:
    """Its clock stands still: no later request of the key is within its limit."""
    circuit = Circuit(folder, ProxyConfig(key_file=keys_of("k name=used-up rpm=1")))
    circuit.stop_clock()
    assert _post(circuit, b"/v1/completions") == b"200"
    assert _post(circuit, b"/v1/completions") == b"429"
    return circuit


def gets_past_no_limit(circuit: Circuit, path: bytes) -> None:
    """Either the child is not asked for ``path``, or llama-server does not infer for it."""
    status = _post(circuit, path)
    if served_as(path) in INFERENCE:
        assert (path, circuit.asked) == (path, [])
        assert (path, status in (b"429", b"404", b"400")) == (path, True)
        assert route_of(path).label == "other" or path in INFERENCE


_ESCAPE = re.compile(rb"%(?:u([0-9A-Fa-f]{4})|([0-9A-Fa-f]{2}))")


def served_as(path: bytes) -> bytes:
    """The path that llama-server routes by (b11434): decoded once, and otherwise as it was written."""
    return _ESCAPE.sub(
        lambda found: (
            chr(int(found[1], 16)).encode("utf-8", "replace") if found[1] else bytes([int(found[2], 16)])
        ),
        path,
    )


def _post(circuit: Circuit, path: bytes) -> bytes:
    lines = (b"Host: localhost", b"X-Api-Key: k", b"Content-Length: 2", b"", b"{}")
    outcome = circuit.send([b"POST " + path + b" HTTP/1.1\r\n" + b"\r\n".join(lines)])
    return outcome.told[9:12]
