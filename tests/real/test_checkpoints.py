"""A changed end of a conversation is cheap for models with a recurrent state, on a real llama-server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamasup import serve
from llamasup.core.gguf.files import read_model
from llamasup.core.planning.memory.kv_cache import ContextShape, checkpoint_bytes
from llamasup.core.settings.model import Profile
from llamasup.core.system.storage.folders import state_folder
from tests.kit.architectures import ARCHITECTURES, write_model
from tests.kit.layers import Widths

TOKENS = [3 + number % 50 for number in range(1800)]


def with_long_context(name: str, folder: Path) -> Path:
    architecture, keys, tensors = ARCHITECTURES[name](Widths())
    path = folder / f"{name}.gguf"
    path.write_bytes(write_model(name, (architecture, {**keys, "context_length": 4096}, tensors)))
    return path


@pytest.mark.contract
@pytest.mark.parametrize("architecture", ["qwen35", "mamba2", "lfm2", "falcon-h1"])
@pytest.mark.parametrize("profile", [None, "memory"])
def test_a_changed_last_message_is_read_alone(
    architecture: str, profile: Profile | None, runtime: str, tmp_path: Path
) -> None:
    path = with_long_context(architecture, tmp_path)
    with serve(str(path), runtime=runtime, profile=profile, parallel=1, ctx_size=4096) as server:
        read: list[int] = []
        for end in (4, 5, 6):
            asked = {"prompt": [*TOKENS, *[end] * 50], "n_predict": 16, "temperature": 0}
            read.append(
                server.client.post("/completion", json=asked).raise_for_status().json()["timings"]["prompt_n"]
            )
    print(architecture, profile, read)
    assert max(read[1:]) < read[0] / 2


@pytest.mark.one_runtime
@pytest.mark.parametrize("architecture", ["qwen35", "mamba2", "falcon-h1", "gemma2"])
def test_a_checkpoint_is_as_large_as_estimated(architecture: str, llama_server: str, tmp_path: Path) -> None:
    path = with_long_context(architecture, tmp_path)
    with serve(str(path), runtime=llama_server, parallel=1, ctx_size=4096, extra=("-lv", "4")) as server:
        asked = {"prompt": TOKENS, "n_predict": 4}
        server.client.post("/completion", json=asked)  # whatever random weights answer
        log = (state_folder() / "logs" / f"{architecture}.log").read_bytes().decode(errors="replace")
    sizes = [float(found) for found in re.findall(r"created context checkpoint .*size = +([\d.]+) MiB", log)]
    # qwen35 drafts with its MTP layers.
    shape = ContextShape(4096, 1, 512, rollback=3 if architecture == "qwen35" else 0)
    estimated = checkpoint_bytes(read_model(path), shape) / (1 << 20)
    print(architecture, sizes, estimated)
    assert sizes
    assert max(sizes) <= estimated + 0.001
    if architecture != "qwen35":  # its tokens fill half of the context
        assert max(sizes) == pytest.approx(estimated, rel=0.02, abs=0.001)
