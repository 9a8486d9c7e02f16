"""The memory that a model needs before its first start, replica by replica."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.shares import RAM
from llamasup.core.pool.answers import as_unavailable
from llamasup.core.pool.estimate import estimate_model
from llamasup.core.settings.model import ModelSettings, Settings
from llamasup.errors import ModelMissing
from tests.core.planning.plans import GIB
from tests.kit.paths import FIXTURES

HELP = FIXTURES / "help" / "b11434.txt"
MAX_OF_THE_LARGER = 4 << 20  # tokens, for which the tiny model needs 5 GiB
BUDGET = {RAM: 64 * GIB, "CUDA0": 8 * GIB, "CUDA1": 4 * GIB}


@pytest.fixture
def two_cards(tmp_path: Path) -> str:
    """A llama-server with two devices that only answers --help, --version and --list-devices."""
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!/bin/sh\ncase $1 in --help) /bin/cat '{HELP}' ;;\n--version) echo 'version: 1 (a)' >&2 ;;\n"
        "--list-devices) echo 'Available devices:'\necho '  CUDA0: A card (8192 MiB, 8192 MiB free)'\n"
        "echo '  CUDA1: A card (4096 MiB, 4096 MiB free)' ;; esac\n"
    )
    program.chmod(0o755)
    return str(program)


LONGER = ("--override-kv", "llama.context_length=int:100000000")


def needs_of(
    model: Path, runtime: str, devices: tuple[str, ...], ctx_size: int, *extra: str
) -> Mapping[str, int]:
    """The memory that the model needs, with a replica for each of ``devices``."""
    spec = ModelSpec(
        "tiny",
        str(model),
        settings=Settings(parallel=1, ctx_size=ctx_size, extra=(*LONGER, *extra)),
        options=ModelSettings(devices=devices),
        replicas=len(devices),
    )
    return estimate_model(spec, BUDGET, runtime, {}).needs


def test_each_replica_is_planned_for_its_device(two_cards: str, tiny_model: Path) -> None:
    """The context fits on the first card but not on the second, and would fit on both together."""
    both = needs_of(tiny_model, two_cards, ("CUDA0", "CUDA1"), MAX_OF_THE_LARGER)
    first, second = (
        needs_of(tiny_model, two_cards, (card,), MAX_OF_THE_LARGER, "--device", card)
        for card in ("CUDA0", "CUDA1")
    )
    assert set(first) == {RAM, "CUDA0"}
    assert second[RAM] > first["CUDA0"]
    assert both == {**first, RAM: first[RAM] + second[RAM]}


def test_two_replicas_on_one_device_need_twice_its_memory(two_cards: str, tiny_model: Path) -> None:
    one = needs_of(tiny_model, two_cards, ("CUDA0",), MAX_OF_THE_LARGER // 4, "--device", "CUDA0")
    both = needs_of(tiny_model, two_cards, ("CUDA0", "CUDA0"), MAX_OF_THE_LARGER // 4)
    assert both == {device: 2 * size_bytes for device, size_bytes in one.items()}


def test_extra_device_flag_decides_the_needs(two_cards: str, tiny_model: Path) -> None:
    settings = Settings(parallel=1, ctx_size=MAX_OF_THE_LARGER // 4, extra=("--device", "CUDA1"))
    spec = ModelSpec("tiny", str(tiny_model), settings=settings)
    assert set(estimate_model(spec, BUDGET, two_cards, {}).needs) == {RAM, "CUDA1"}


def test_clients_see_the_load_error_without_paths() -> None:
    spec = ModelSpec("tiny", "/srv/tiny.gguf")
    error = ModelMissing("/srv/tiny.gguf: there is no such file", remedy="Did you mean /srv/tyni.gguf?")
    shown = as_unavailable(error, spec)
    assert (shown.status, shown.cause) == (503, "model_missing")
    assert (shown.message, shown.remedy) == ("tiny.gguf: there is no such file", "Did you mean tyni.gguf?")

    server = HttpError(
        503, "The file '/secret/p.gguf' cannot be opened.", "server_error", "x", "See /secret."
    )
    shown = as_unavailable(error, spec, server)
    assert (shown.status, shown.type, shown.cause, shown.remedy) == (503, "server_error", "x", "")
    assert shown.message == "The file 'p.gguf' cannot be opened."

    shown = as_unavailable(error, spec, HttpError(503, "The folder '/secret' cannot be read."))
    assert shown.message == "The model 'tiny' cannot be loaded: llamasup's log says why"
