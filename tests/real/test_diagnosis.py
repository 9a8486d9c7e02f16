"""Real servers that cannot start: the diagnosis of ``llamasup run``, on both runtimes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.driver import run_to_end
from tests.kit.children import NewChildren
from tests.kit.tiny import tiny_decoder

GIB = 1 << 30


def check_refused(
    code: int, says: tuple[str, ...], runtime: str, *arguments: str, limit: Callable[[], None] | None = None
) -> None:
    new_children = NewChildren()
    done = run_to_end("run", "--runtime", runtime, "--port", "0", *arguments, preexec_fn=limit)
    assert done.returncode == code, done.stderr
    for words in says:
        assert words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert new_children() == []


@pytest.mark.contract
def test_missing_tensor_is_diagnosed(runtime: str, tmp_path: Path) -> None:
    """The header is valid; only the server knows which tensors the architecture needs."""
    path = tmp_path / "tensor.gguf"
    path.write_bytes(tiny_decoder().replace(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"))
    check_refused(65, ("blk.1.attn_q.weight", "llama-server said:", "→"), runtime, str(path))


@pytest.mark.contract
def test_exhausted_address_space_is_diagnosed(runtime: str, tiny_model: Path) -> None:
    """4 GiB of KV cache under a limit of 4 GiB: the server's own allocation fails on any machine."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * GIB, 4 * GIB))

    check_refused(
        71,
        ("ran out of memory",),
        *(runtime, str(tiny_model), "--parallel", "8", "--kv-type", "f16"),
        "--no-memory-check",  # it would be refused before the start
        *("--", "--ctx-size", "8000000"),
        limit=limit,
    )


@pytest.mark.contract
def test_value_refused_by_the_server_is_diagnosed(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    check_refused(
        2,
        ("--grammar-file", nowhere),
        *(runtime, str(tiny_model), "--", "--grammar-file", nowhere),
    )
